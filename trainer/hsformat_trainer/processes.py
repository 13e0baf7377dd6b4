"""The processes of a run, through ``accelerate``: one, several (DDP), or with the draft in parts (FSDP2).

How many there are and whether the draft is cut is what ``accelerate launch`` or ``torchrun`` say; precision is what the
configuration says, here as in one process: torch's autocast over weights that stay float32, also where they are cut, so
that gradients are added in float32 between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType, gather_object
from torch import nn

from hsformat.problems import HsError, problem

from hsformat_trainer.config import TrainConfig
from hsformat_trainer.tracking import check_trackers, flat

__all__ = ["Processes"]


class Processes:
    """What a run asks of the other processes; with one process it costs nothing.

    Parameters
    ----------
    config
        Device, precision and trackers are read.

    Raises
    ------
    HsError
        HS410: a tracker is not installed; there is no such device; a way of running that the trainer does not have.
    """

    def __init__(self, config: TrainConfig) -> None:
        check_trackers(config.trackers)
        self._config = config
        cpu = config.device == "cpu" or not torch.accelerator.is_available()
        self._accelerator = Accelerator(
            cpu=cpu,
            mixed_precision="no",
            log_with=list(config.trackers) or None,
            project_dir=config.out,
            # Buffers are the vocabulary map, the same everywhere.
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        )
        self.device: torch.device = self._accelerator.device
        self._check(config)
        self._tracks = False

    def _check(self, config: TrainConfig) -> None:
        kind = self._accelerator.distributed_type
        if config.device not in ("auto", "cpu") and torch.device(config.device).type != self.device.type:
            got, expected = f"device {self.device}", f"device {config.device}"
            fix = "device: auto takes what there is"
            raise HsError(problem("HS410", where="--device", got=got, expected=expected, fix=fix))
        several = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.NO)
        if kind not in several and not self._accelerator.is_fsdp2:
            got, expected = f"{kind.value}", "one process, several (DDP), or FSDP2"
            fix = "accelerate launch --use_fsdp --fsdp_version 2, or without these options"
            raise HsError(problem("HS410", where="accelerate", got=got, expected=expected, fix=fix))

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self._accelerator.num_processes)

    @property
    def rank(self) -> int:
        """Which this is."""
        return int(self._accelerator.process_index)

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether parameters are cut among the processes."""
        return bool(self._accelerator.is_fsdp2)

    def prepare(
        self, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
        """Return the module that is called and the optimizers of its parameters, on the device."""
        if self.sharded:
            plugin = self._accelerator.state.fsdp_plugin
            plugin.auto_wrap_policy = None  # one layer is one group; and all of it is used in one forward
            plugin.cpu_ram_efficient_loading = False
            plugin.mixed_precision_policy = None
        model.to(self.device)
        prepared, *wrapped = self._accelerator.prepare(model, *optimizers.values())
        return prepared, {name: w.optimizer for name, w in zip(optimizers, wrapped, strict=True)}

    def accumulating(self, model: nn.Module) -> Any:
        """Return a context in which gradients stay in this process, for all batches of a step but the last."""
        return self._accelerator.no_sync(model) if self.count > 1 else nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that all processes share the sum of.

        DDP and FSDP2 take the mean over processes, so that a sum wants their number as a factor.
        """
        (loss * self.count if self.count > 1 else loss).backward()

    def autocast(self) -> Any:
        """Return the context of the configuration's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._config.precision == "bf16")

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Give every process the whole of the parameters, for what is not called through the module itself."""
        if not self.sharded:
            yield
            return
        model.unshard()  # type: ignore[operator] # FSDPModule's, which fully_shard puts among the module's classes
        try:
            yield
        finally:
            model.reshard()  # type: ignore[operator] # see above

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, of numbers on the CPU or the device, on the CPU."""
        if self.count == 1:
            return values.cpu()
        return torch.as_tensor(self._accelerator.reduce(values.to(self.device), reduction="sum")).cpu()

    def most(self, value: int) -> int:
        """Return the largest of the numbers of all processes."""
        if self.count == 1:
            return value
        return int(self._accelerator.gather(torch.tensor([value], device=self.device)).max())

    def once(self, action: Callable[[], None]) -> None:
        """Let the first process do something, and wait for it.

        Raises
        ------
        HsError
            In the first process: what it raised there.
        SystemExit
            In the others: the first one ends with an error.
        """
        error: HsError | None = None
        if self.first:
            try:
                action()
            except HsError as e:
                error = e
        if self.most(int(error is not None)):
            raise error or SystemExit(1)

    def join(self, values: Sequence[Any]) -> list[Any]:
        """Return the objects of all processes, those of the first first."""
        return list(values) if self.count == 1 else list(gather_object(list(values)))

    def wait(self) -> None:
        """Wait until every process is here."""
        self._accelerator.wait_for_everyone()

    def track(self, values: Mapping[str, float], step: int) -> None:
        """Tell the trackers numbers; begins with them at the first call."""
        if not self._config.trackers:
            return
        if not self._tracks:
            self._accelerator.init_trackers(self._config.project, config=flat(self._config.model_dump(mode="json")))
            self._tracks = True
        self._accelerator.log(dict(values), step=step)

    def close(self) -> None:
        """End the trackers and let go of the model."""
        if self._tracks:
            self._accelerator.end_training()
        self._accelerator.free_memory()
