"""Engines that a probe is tried on: what they capture is stated here, and some of them misbehave.

They run in the probe's child process, which imports this file; the states are in the target's folder (``FakeProbe``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hsformat_extractors.probes import tiny
from hsformat_extractors.probes.draft_math import Target
from hsformat_extractors.probes.probe import Probe
from hsformat_extractors.probes.serve import FEATURES, Job, write_array

__all__ = ["FakeProbe", "Vllm", "random_states"]


def random_states(num_layers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(num_layers)
    shape = (len(tiny.PROMPT), tiny.HIDDEN)
    keys = [*(f"d{d}" for d in range(num_layers + 1)), f"d{num_layers}n"]
    return {key: rng.standard_normal(shape).astype(np.float32) for key in keys}


class FakeProbe(Probe):
    """Probes a class of this module; ``numpy`` stands for its package."""

    name: ClassVar[str] = "fake"
    package: ClassVar[str] = "numpy"
    install: ClassVar[str] = "pip install fake"

    def __init__(self, engine: str) -> None:
        self.driver = f"fake_engines:{engine}"  # type: ignore[misc]  # a fake

    def environment(self) -> dict[str, str]:
        here = str(Path(__file__).parent)
        return {"PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}

    def _target(self, folder: Path, request: Any, num_layers: int) -> Target:
        states = random_states(num_layers)
        path = folder / f"target-{num_layers}"
        path.mkdir()
        np.savez(path / "states.npz", **states)
        return Target(states=states, embedding=np.zeros(0), head=np.zeros(0))


class Vllm:
    """Depth = id, ascending, each once; depth N before the final norm; a wrong number of slots is an error."""

    shift = 0
    last = "d{}"

    def serve(self, job: Job) -> None:
        features = self.features(job)
        if features is not None:
            write_array(Path(job.out) / FEATURES, features)

    def features(self, job: Job) -> np.ndarray | None:
        config = json.loads((Path(job.draft) / "config.json").read_text())
        with np.load(Path(job.target) / "states.npz") as f:
            states = dict(f)
        n = len(states) - 2
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        depths = self.default(n) if ids is None else self.captured(ids, n)
        if len(depths) != job.slots:
            raise RuntimeError(f"shape '[-1, {job.slots}]' is invalid for {len(depths)} states")
        noise = np.random.default_rng(0)
        rows = [states[self.last.format(n) if d == n else f"d{d}"] for d in depths]
        return np.concatenate([r * (1 + 1e-7 * noise.standard_normal(r.shape)) for r in rows], axis=1)

    def default(self, n: int) -> list[int]:
        return [2, n // 2, n - 3]

    def captured(self, ids: list[int], n: int) -> list[int]:
        return sorted({i + self.shift for i in ids} & set(range(n + 1)))


class Sglang(Vllm):
    """Depth = id + 1; depth N kills the process, as SGLang 0.5.23 does with the one that started it."""

    shift = 1

    def captured(self, ids: list[int], n: int) -> list[int]:
        if max(ids) + self.shift >= n:
            print("IndexError: list index out of range", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().captured(ids, n)


class FirstIsOne(Vllm):
    """Depth = id + 1 if the first id is 1, otherwise depth = id."""

    def captured(self, ids: list[int], n: int) -> list[int]:
        return super().captured([i + (ids[0] == 1) for i in ids], n)


class MaxIsN(Vllm):
    """Depth = id if the largest id is N, otherwise id + 1."""

    def captured(self, ids: list[int], n: int) -> list[int]:
        return super().captured([i + (max(ids) != n) for i in ids], n)


class BeforeEachLayer(Vllm):
    """The state before each layer but the first, and none after the last."""

    def captured(self, ids: list[int], n: int) -> list[int]:
        return [d for d in super().captured(ids, n) if 0 < d < n]


class AsGiven(Vllm):
    """The list as it stands; depth N after the final norm; no default."""

    last = "d{}n"

    def captured(self, ids: list[int], n: int) -> list[int]:
        return list(ids)

    def default(self, n: int) -> list[int]:
        raise ValueError("no layer ids")


class OtherDefault(Sglang):
    """One more than SGLang's in the middle."""

    def default(self, n: int) -> list[int]:
        return [2, n // 2 + 1, n - 3]


class OffByOneInTheUpperHalf(Vllm):
    def captured(self, ids: list[int], n: int) -> list[int]:
        return sorted({i + (i > n // 2) for i in ids})


class ClampsToTheLastButOne(Vllm):
    def captured(self, ids: list[int], n: int) -> list[int]:
        return sorted({min(i, n - 1) for i in ids})


class MissingLast(Vllm):
    def features(self, job: Job) -> np.ndarray | None:
        features = super().features(job)
        assert features is not None
        return features[:, : -tiny.HIDDEN]


class MissingRows(Vllm):
    def features(self, job: Job) -> np.ndarray | None:
        features = super().features(job)
        assert features is not None
        return features[-3:]


class AnotherStream(Vllm):
    def features(self, job: Job) -> np.ndarray | None:
        features = super().features(job)
        assert features is not None
        return 2 * features


class NotANumber(Vllm):
    def features(self, job: Job) -> np.ndarray | None:
        features = super().features(job)
        assert features is not None
        features[3, 3] = np.nan
        return features


class RunsNoDraft(Vllm):
    def features(self, job: Job) -> np.ndarray | None:
        return None


class DefaultThatFollowsNothing(Vllm):
    def default(self, n: int) -> list[int]:
        return [1, 2, 3 * n % 7]


class Dead(Vllm):
    def __init__(self) -> None:
        print("starting")
        print("RuntimeError: no device here", file=sys.stderr)
        os._exit(3)


class Killed(Vllm):
    def features(self, job: Job) -> np.ndarray | None:
        print("loading weights", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class Forked(Vllm):
    """Each job in a process of its own, which leaves nothing to the next one."""

    jobs = 0

    def prepare(self) -> bool:
        self.parent = os.getpid()
        return True

    def features(self, job: Job) -> np.ndarray | None:
        assert os.getpid() != self.parent
        self.jobs += 1
        assert self.jobs == 1
        return super().features(job)


class ForkedAndKilled(Forked):
    """Its fork is killed with what it printed last, as by SGLang."""

    def features(self, job: Job) -> np.ndarray | None:
        print("RuntimeError: no scheduler", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class ForkedSglang(Forked, Sglang):
    """Fails for depth N; leaves a process behind, which must not be there for the next job."""

    def prepare(self) -> bool:
        with open(os.environ["FAKE_LOG_FILE"], "a") as f:
            f.write("prepared\n")
        return super().prepare()

    def features(self, job: Job) -> np.ndarray | None:
        log = Path(os.environ["FAKE_LOG_FILE"])
        before = [line for line in log.read_text().split() if line.isdigit()]
        if before and Path(f"/proc/{before[-1]}").exists() and "Z" not in Path(f"/proc/{before[-1]}/stat").read_text():
            raise RuntimeError("the process of the job before is still there")
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        with log.open("a") as f:
            f.write(f"{pid}\n")
        return super().features(job)


class ForkedAndGone(ForkedSglang):
    """Its fork ends with code 0 where SGLang's is killed, without a word of what came of the job."""

    def captured(self, ids: list[int], n: int) -> list[int]:
        if max(ids) + self.shift >= n:
            sys.exit(0) if n % 2 else os._exit(0)
        return super().captured(ids, n)


class ForkedAndDead(Forked):
    """Its fork ends with an exit code."""

    def features(self, job: Job) -> np.ndarray | None:
        os._exit(4)


class Hanging(Vllm):
    """Starts a process of its own, and never answers."""

    def features(self, job: Job) -> np.ndarray | None:
        if os.fork() == 0:
            Path(os.environ["FAKE_PID_FILE"]).write_text(str(os.getpid()))
        time.sleep(600)
        return None


class Noisy(Vllm):
    """Prints without end of line, and bytes that are no text."""

    def features(self, job: Job) -> np.ndarray | None:
        sys.stdout.buffer.write(b"\xff\xfe{}\n" * 50_000 + b"answer.json")
        return super().features(job)


class SaysVllm(FakeProbe):
    """A probe that calls itself vLLM 0.32.0, whose rows the table has; the engine does what SGLang does."""

    name: ClassVar[str] = "vllm"

    def __init__(self) -> None:
        super().__init__("Sglang")

    def version(self) -> str:
        return "0.32.0"


class SaysNewVllm(FakeProbe):
    """A probe of a version that no table has."""

    name: ClassVar[str] = "vllm"

    def __init__(self) -> None:
        super().__init__("Vllm")

    def version(self) -> str:
        return "99.1.0"


class DeadProbe(FakeProbe):
    def __init__(self) -> None:
        super().__init__("Dead")


class NoProbe:
    name = "none"


class BrokenProbe:
    def __init__(self) -> None:
        raise OSError("libfake.so: cannot open shared object file")
