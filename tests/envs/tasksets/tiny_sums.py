"""Sums of two numbers in one turn: two rewards, of unequal weight."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class Row(vf.TaskData):
    answer: str


class Sum(vf.Task[Row, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    most: int = 20
    first: int = 0  # shifts what a row asks: another taskset under the same name


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for a in range(self.config.first, self.config.first + self.config.most):
            for b in range(self.config.most):
                yield Sum(Row(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
