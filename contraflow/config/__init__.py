"""A run's configuration: one frozen section per room, read from a TOML recipe plus `--set section.key=value`.

Takes a file and overrides, gives a checked `Recipe` or a `ConfigError` that names the key, the value, what is allowed
and the nearest name. Does not import torch, start anything, or derive one section from another.
"""

from contraflow.config.alarms import Alarms
from contraflow.config.base import Compute, Section
from contraflow.config.cluster import Cluster, Pool, PoolName
from contraflow.config.critic import Critic
from contraflow.config.curriculum import Curriculum
from contraflow.config.engine import Engine, Parallel
from contraflow.config.judge import Judge
from contraflow.config.launch import Launch
from contraflow.config.loss import Loss
from contraflow.config.preference import Preferences, RewardTraining, Scorer
from contraflow.config.reading import (
    check_recipe,
    check_section,
    load_recipe,
    load_reward_recipe,
    load_sft_recipe,
    recipe_toml,
)
from contraflow.config.recipe import Buffer, Env, Model, Recipe, Reward, Rollout, Run, Runtime, Train, Weights
from contraflow.config.sandbox import Sandbox
from contraflow.config.server import Server
from contraflow.config.sft import Chat, NewModel, RewardRecipe, Sft, SftRecipe

__all__ = [
    "Alarms",
    "Buffer",
    "Chat",
    "Cluster",
    "Compute",
    "Critic",
    "Curriculum",
    "Engine",
    "Env",
    "Judge",
    "Launch",
    "Loss",
    "Model",
    "NewModel",
    "Parallel",
    "Pool",
    "PoolName",
    "Preferences",
    "Recipe",
    "Reward",
    "RewardRecipe",
    "RewardTraining",
    "Rollout",
    "Run",
    "Runtime",
    "Sandbox",
    "Scorer",
    "Section",
    "Server",
    "Sft",
    "SftRecipe",
    "Train",
    "Weights",
    "check_recipe",
    "check_section",
    "load_recipe",
    "load_reward_recipe",
    "load_sft_recipe",
    "recipe_toml",
]
