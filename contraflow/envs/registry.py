"""The environments a recipe can name, and how one is made from its options."""

from collections.abc import Callable, Mapping
from typing import Any

from contraflow.envs.arithmetic import Arithmetic, ArithmeticOptions
from contraflow.envs.base import Env
from contraflow.envs.harness import Harness, HarnessOptions
from contraflow.envs.options import read_options
from contraflow.envs.reasoning_gym import ReasoningGym, ReasoningGymOptions
from contraflow.envs.tools import Calculator, CalculatorOptions
from contraflow.envs.verifiers import Verifiers, VerifiersOptions
from contraflow.errors import ConfigError, ContraflowError
from contraflow.named import find

Maker = Callable[[Mapping[str, Any]], Env]

ENVS: dict[str, Maker] = {
    "arithmetic": lambda options: Arithmetic(read_options(ArithmeticOptions, options)),
    "calculator": lambda options: Calculator(read_options(CalculatorOptions, options)),
    "harness": lambda options: Harness(read_options(HarnessOptions, options), make_env),
    "reasoning_gym": lambda options: ReasoningGym(read_options(ReasoningGymOptions, options)),
    "verifiers": lambda options: Verifiers(read_options(VerifiersOptions, options)),
}


def make_env(name: str, options: Mapping[str, Any]) -> Env:
    """The environment a recipe names: one of `ENVS`, or the user's own `module:MAKER` or `file.py:MAKER`.

    A maker is called with the options and gives an `Env`; a class that takes them in its constructor is one.
    Raises: ConfigError for an unknown name, options that do not fit, or a maker that fails or gives no environment.
    """
    maker = find(name, ENVS, what="env.name")
    try:
        env = maker(options)
    except ContraflowError:
        raise
    except Exception as fault:
        raise ConfigError(f"env {name!r} could not be made: {type(fault).__name__}: {fault}") from fault
    missing = [part for part in ("name", "bounded", "task", "open") if not hasattr(env, part)]
    if missing:
        raise ConfigError(f"env {name!r} gave a {type(env).__name__} without {', '.join(missing)}; see envs/base.py")
    made: Env = env
    return made
