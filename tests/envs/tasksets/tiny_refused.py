"""A taskset that serves tools, or needs a container, or has no reward."""

import verifiers.v1 as vf

__all__ = ["Refused"]


class RefusedConfig(vf.TasksetConfig):
    tools: bool = False


class Plain(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class Refused(vf.Taskset[Plain, RefusedConfig]):
    def load(self):
        for number in range(100):
            yield Plain(vf.TaskData(prompt=f"question {number}"))

    @classmethod
    def toolsets(cls, config):
        return [vf.Toolset(vf.ToolsetConfig())] if config.tools else []
