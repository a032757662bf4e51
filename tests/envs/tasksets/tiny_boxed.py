"""A taskset whose tasks need a container."""

import verifiers.v1 as vf

__all__ = ["Boxes"]


class Box(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    NEEDS_CONTAINER = True


class Boxes(vf.Taskset[Box, vf.TasksetConfig]):
    def load(self):
        yield Box(vf.TaskData(prompt="a question"))
