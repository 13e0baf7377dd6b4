"""The processes of a run, through ``accelerate``: one, several (DDP), or with the draft in parts (FSDP2).

How many there are and whether the draft is cut is what ``accelerate launch`` or ``torchrun`` say; precision is what
the configuration says, here as in one process: torch's autocast over weights that stay float32, also where they are
cut, so that gradients are added in float32 between processes. The draft is cut by torch's ``fully_shard`` as one group,
since all of it is used in one forward; accelerate (1.15) would leave FSDP2 out on CPUs without a word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import gather_object, parse_flag_from_env, patch_environment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hsformat.problems import HsError, problem
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.tracking import check_trackers, flat

__all__ = ["Processes"]


def _choose(name: str) -> str | None:
    """Return which device of several is asked for by its number, and make it torch's own; None: none is.

    Raises
    ------
    HsError
        HS410: there is none of this name, or several processes each have their own.
    """
    if name in ("auto", "cpu"):
        return None
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if there is None else torch.accelerator.device_count()
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or there is None or device.type != there.type or (device.index or 0) >= count:
        names = ["auto", "cpu", *([] if there is None else [there.type, *(f"{there.type}:{i}" for i in range(count))])]
        expected, fix = f"one of {', '.join(names)}", "--device auto takes what there is"
        raise HsError(problem("HS410", where="--device", got=name, expected=expected, fix=fix))
    index: int | None = device.index  # torch's annotation leaves None out
    if index is None:
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        expected, fix = f"{there.type} or auto: each process has its own", "choose devices with CUDA_VISIBLE_DEVICES"
        raise HsError(problem("HS410", where="--device", got=name, expected=expected, fix=fix))
    torch.accelerator.set_device_index(index)
    return str(device)


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
        chosen = _choose(config.device)
        self._config = config
        cpu = config.device == "cpu" or not torch.accelerator.is_available()
        with patch_environment(**({} if chosen is None else {"ACCELERATE_TORCH_DEVICE": chosen})):
            self._accelerator = Accelerator(
                cpu=cpu,
                mixed_precision="no",
                log_with=list(config.trackers) or None,
                project_dir=config.out,
                kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            )
        self.device: torch.device = self._accelerator.device
        self.sharded = self._check(config)
        self._tracks = False

    def _check(self, config: TrainConfig) -> bool:
        """Return whether the draft is cut among the processes; refuse what there is not."""
        kind = self._accelerator.distributed_type.value
        if "FSDP" in kind or parse_flag_from_env("ACCELERATE_USE_FSDP"):
            kind = "FSDP2" if os.environ.get("FSDP_VERSION", "1") == "2" else "FSDP1"
            if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
                kind += " with parameters offloaded"
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP2"):
            expected = "one process, several (DDP), or FSDP2 without offloading"
            fix = "accelerate launch --use_fsdp --fsdp_version 2, or without these options"
            raise HsError(problem("HS410", where="accelerate", got=kind, expected=expected, fix=fix))
        return kind == "FSDP2" and self.count > 1

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

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the module that is called, on the device. Optimizers are made after it, of its parameters."""
        model.to(self.device)
        if self.sharded:
            fully_shard(model, mesh=init_device_mesh(self.device.type, (self.count,)))
            return model
        prepared: nn.Module = self._accelerator.prepare(model)
        return prepared

    @contextmanager
    def accumulating(self, model: nn.Module) -> Iterator[None]:
        """Keep gradients in this process, for all batches of a step but the last."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)
        else:
            with self._accelerator.no_sync(model):
                yield

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that all processes share the sum of.

        DDP and FSDP2 take the mean over processes, so that a sum wants their number as a factor.
        """
        torch.autograd.backward(loss * self.count if self.count > 1 else loss)

    def autocast(self) -> Any:
        """Return the context of the configuration's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._config.precision == "bf16")

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Give every process the whole of the parameters, for what is not called through the module itself."""
        if not isinstance(model, FSDPModule):
            yield
            return
        model.unshard()
        try:
            yield
        finally:
            model.reshard()

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
