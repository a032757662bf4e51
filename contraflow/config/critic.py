"""The critic of PPO: what it is made of, and how its values become credit."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contraflow.config.base import Section, Share


class Critic(Section):
    """Values of states, for `loss.advantages = "gae"`; without that, there is no critic."""

    trunk: Literal["own", "shared"] = "own"  # a model of its own under the value head, or the policy's
    folder: str = ""  # what an own one starts from, with its value head if it has one; empty is the policy's
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3  # of what is the critic's own; the rest as [train] has it
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # first steps, in which it alone is trained
    clip: Annotated[float, Field(ge=0)] = 0.2  # how far an update may move a value, as PPO2 has it; 0: no bound
    discount: Share = 1.0  # gamma, by token or by turn
    trace: Share = 0.95  # lambda of GAE
    unit: Literal["token", "turn"] = "token"  # what one action is
    truncated: Literal["bootstrap", "end"] = "end"  # what an episode that the budget cut off was still worth
    whiten: bool = True  # advantages less their mean, over their spread, over all trained tokens of a take
    weight: Annotated[float, Field(ge=0)] = 0.1  # of the value loss in a shared trunk's gradient

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.trunk == "shared" and self.folder:
            raise ValueError(
                f"folder = {self.folder!r} with trunk = 'shared': the policy is the critic's model too; leave folder"
                " empty, or use trunk = 'own'"
            )
        return self
