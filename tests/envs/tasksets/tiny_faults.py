"""Tasks whose rewards break, each in the way its options say; whole ones are worth the id of the process that plays."""

import asyncio
import os
import time

import verifiers.v1 as vf

__all__ = ["Faults"]


class Row(vf.TaskData):
    how: str


class Fault(vf.Task[Row, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def worth(self, trace: vf.Trace) -> float:
        print("a line on standard output")
        match self.data.how:
            case "raises":
                raise ValueError("no idea what this is worth")
            case "hangs":
                await asyncio.sleep(60)
            case "blocks":
                time.sleep(60)  # noqa: ASYNC251 - what is tested
            case "dies":
                os._exit(3)
            case "nan":
                return float("nan")
        return float(os.getpid())


class FaultsConfig(vf.TasksetConfig):
    how: str = "whole"


class Faults(vf.Taskset[Fault, FaultsConfig]):
    def load(self):
        for number in range(100):
            how = self.config.how if number % 2 else "whole"
            yield Fault(Row(prompt=f"question {number}", name=how, how=how))
