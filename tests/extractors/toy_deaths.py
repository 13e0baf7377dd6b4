"""The toy engine with a fault each: it ends, hangs, does not start, or prints what it should not."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

from toy_llama import Honest

from hsformat.problems import HsError, Severity, problem
from hsformat_extractors.hosted.beat import Beat


class Dies(Honest):
    """Ends in the middle of the first window after the proof, after five answers."""

    def run(self, asks):
        for i, found in enumerate(super().run(asks)):
            if self.proved and i == 5:
                print("about to end", flush=True)
                self.end()
            yield found

    def end(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class IsKilled(Dies):
    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Dies):
    def end(self):
        sys.exit(3)


class Hangs(Dies):
    def end(self):
        time.sleep(600)


class WorksOnOneAnswer(Dies):
    """Longer than anything may be silent, and says that it gets on."""

    def __init__(self):
        super().__init__()
        self.beat = Beat()

    def end(self):
        for _ in range(40):
            time.sleep(0.1)
            self.beat()


class NoSpace(Dies):
    def end(self):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            raise RuntimeError("states cannot be written") from e


class NeverStarts(Honest):
    def start(self, launch):
        time.sleep(600)


class FailsToStart(Honest):  # vllm#51016, #53243, SpecForge#345, PR#290
    def start(self, launch):
        raise AssertionError("581 GiB of KV cache are needed, 40 GiB are there")


class Refuses(Honest):
    """Raises a problem that is an error here, and a note by its code."""

    def start(self, launch):
        severity = Severity.ERROR
        raise HsError(problem("HS506", where="staging", got="no space", expected="space", severity=severity))


class LeavesAChild(Honest):
    """An engine's own process, which heeds no SIGTERM, and has the log open."""

    def start(self, launch):
        told = dict(super().start(launch))
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
            os._exit(0)
        return {**told, "engine": {"pid": pid}}


class Prints(Honest):
    """Prints what looks like messages, reads stdin, and closes what it did not open."""

    def start(self, launch):
        print('{"kind": "answer", "request": "x"}\n' * 1000, flush=True)
        os.system("echo from a shell; cat")
        return super().start(launch)

    def run(self, asks):
        sys.stderr.write("\xff\x00 not a message\r\n" * 100)
        for found in super().run(asks):
            os.write(1, b'{"kind": "done", "window": 99}\n\xfe')
            yield found


class Slow(Honest):
    """Takes its time after the proof."""

    def run(self, asks):
        for found in super().run(asks):
            time.sleep(0.05 if self.proved else 0)
            yield found
