"""A conversation of several turns, which the environment drives: it answers what the model says, and counts."""

import verifiers.v1 as vf

__all__ = ["Talk", "Talks"]


class Row(vf.TaskData):
    turns: int


class Topic(vf.Task[Row, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def turns_said(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))

    @vf.reward(weight=0.001)
    async def letters_said(self, trace: vf.Trace) -> float:
        return float(sum(len((message.content or "").strip()) for message in trace.assistant_messages))


class Talks(vf.Taskset[Topic, vf.TasksetConfig]):
    def load(self):
        for number in range(60):
            yield Topic(Row(prompt=f"topic {number}", system_prompt="be the other", turns=2 + number % 3))


class Talk(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: Topic, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for number in range(1, task.data.turns):
                if said.terminated:
                    return
                said = await talk.turn(f"<|im_end|> there, {len(said.last_reply)} letters and {number} turns")
