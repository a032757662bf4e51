"""What every section of a recipe is made of: frozen, no unknown keys, no silent conversions; and its common types."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Compute = Literal["float32", "bfloat16"]
Device = Annotated[str, Field(pattern="^(cpu|cuda|cuda:[0-9]{1,4})$")]


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
