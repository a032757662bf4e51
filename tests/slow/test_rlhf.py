"""From preferences to a policy: held-out pairs are told apart, and the rule behind them rises (minutes)."""

import subprocess
import sys
from pathlib import Path

import pytest

from contraflow.config import load_reward_recipe
from contraflow.telemetry import read_journal
from contraflow.train.reward_model import make_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_policy_rewarded_by_a_reward_model_earns_more_of_the_rule_behind_it(tmp_path: Path) -> None:
    told = list(make_reward_model(load_reward_recipe(RECIPES / "rlhf_reward_model.toml"), tmp_path / "reward_model"))
    assert float(told[-2].partition("accuracy ")[2].split()[0]) >= 0.9
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", str(RECIPES / "rlhf_grpo.toml")]
    command += ["--folder", str(tmp_path / "run"), "--plain", "--set", f"reward.model.folder={tmp_path}/reward_model"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    looks = [record["parts"] for record in read_journal(tmp_path / "run/metrics.jsonl") if record["kind"] == "eval"]
    assert looks[-1]["model"] > looks[0]["model"] + 1.0
    assert looks[-1]["even"] > looks[0]["even"] + 0.3
