"""Recipes whose ranks could not work together are refused before anything starts, naming settings and sizes."""

from typing import Any

import pytest

from contraflow.config import check_recipe
from contraflow.errors import ConfigError
from contraflow.system import check_layouts, check_wire

EP2: dict[str, Any] = {"dp": 2, "ep": 2}


def recipe(train: dict[str, Any], engine: dict[str, Any], **more: Any) -> Any:
    return check_recipe({"train": {"parallel": train}, "engine": {"parallel": engine}, **more})


@pytest.mark.parametrize(
    ("train", "engine", "said"),
    [
        ({"pp": 4}, {}, r"train.parallel: pp = 4 .* makes 4 stages of the model's 3 layers"),
        ({"pp": 2, "schedule": "interleaved"}, {}, r"schedule 'interleaved' makes 4 stages of the model's 3 layers"),
        (EP2 | {"dispatch": "deepep"}, {}, r"train.parallel.dispatch = 'deepep' needs train.device = 'cuda'"),
        (EP2 | {"dispatch": "nvlink"}, {}, r"train.parallel.dispatch = 'nvlink' needs train.device = 'cuda'"),
        ({}, EP2 | {"dispatch": "nvlink"}, r"engine.parallel.dispatch = 'nvlink' needs engine.device = 'cuda'"),
        ({}, EP2 | {"dispatch": "deepep"}, r"engine.parallel.dispatch = 'deepep' needs engine.device = 'cuda'"),
    ],
)
def test_layouts_that_cannot_run_are_refused(train: dict[str, Any], engine: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layouts(recipe(train, engine))


def test_buffers_of_one_precision_are_refused_two() -> None:
    parallel = EP2 | {"dispatch": "nvlink"}
    train = {"device": "cuda", "compute": "bfloat16", "parallel": parallel}
    with pytest.raises(ConfigError, match=r"trainer computes in bfloat16 and its proofs in the engine's float32"):
        check_layouts(check_recipe({"train": train}))
    check_layouts(check_recipe({"train": train, "engine": {"compute": "bfloat16"}}))


def test_domains_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="domain_ranks = 3 does not divide the 2 ranks"):
        recipe(EP2 | {"domain_ranks": 3}, {})


FP8 = EP2 | {"wire": "fp8", "dispatch": "all_to_all"}


@pytest.mark.parametrize(
    ("train", "engine"),
    [
        (FP8, EP2 | {"dispatch": "all_to_all"}),  # rounded on one side only
        (FP8 | {"dispatch": "auto"}, FP8 | {"dispatch": "auto"}),  # whose forms may differ
        (FP8, FP8 | {"dispatch": "hierarchical"}),  # added up in another order
        (FP8, {"wire": "fp8", "dispatch": "all_to_all"}),  # an engine of one rank rounds nothing
    ],
)
def test_tokens_rounded_unlike_need_a_wider_proof(train: dict[str, Any], engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"weights.probe_tolerance = 0.001: tokens rounded on their way"):
        check_wire(recipe(train, engine))
    check_wire(recipe(train, engine, weights={"probe_tolerance": 0.05}))


@pytest.mark.parametrize(("train", "engine"), [(FP8, FP8), (EP2, EP2), ({"wire": "fp8"}, {})])
def test_tokens_rounded_alike_or_not_at_all_need_none(train: dict[str, Any], engine: dict[str, Any]) -> None:
    check_wire(recipe(train, engine))
