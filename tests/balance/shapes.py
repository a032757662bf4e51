"""Shapes of models that recipes name."""

import json
from pathlib import Path

from contraflow.model.families import ModelConfig


def shape(name: str) -> ModelConfig:
    file = Path(__file__).parent.parent.parent / f"recipes/shapes/{name}.json"
    return ModelConfig.from_hf(json.loads(file.read_text(encoding="utf-8")))
