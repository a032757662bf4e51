"""A recipe is checked before anything starts, and its errors say what to do."""

import tomllib
from pathlib import Path

import pytest

from contraflow.config import Pool, Recipe, check_recipe, load_recipe, load_sft_recipe, recipe_toml
from contraflow.errors import ConfigError

CLUSTER = {
    "name": "c",
    "region": "us-west-2",
    "zone": "us-west-2b",
    "second_zone": "us-west-2a",
    "storage": "s3://bucket/run",
    "gpu_image": "gpu:1",
    "cpu_image": "cpu:1",
    "pools": {"train": {"instance": "p5en.48xlarge"}},
}
SHIPPED = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_recipe_is_a_whole_run() -> None:
    assert check_recipe({}) == Recipe()


def test_tickets_follow_from_age_and_groups() -> None:
    recipe = check_recipe({"buffer": {"max_age": 2, "groups_per_step": 5}})
    assert recipe.buffer.tickets == 15


def test_a_recipe_survives_being_written_out(tmp_path: Path) -> None:
    recipe = check_recipe(
        {
            "env": {"options": {"kinds": [{"op": "+", "digits": [2, 3]}], "reversed": True}},
            "train": {"betas": [0.8, 0.9]},
        }
    )
    assert load_recipe(written(tmp_path, recipe_toml(recipe))) == recipe


def test_a_cluster_survives_being_written_out(tmp_path: Path) -> None:
    recipe = check_recipe({"cluster": CLUSTER | {"pools": {"train": {"instance": "p5en.48xlarge", "nodes": 2}}}})
    assert recipe.cluster.pools["train"].nodes == 2
    assert load_recipe(written(tmp_path, recipe_toml(recipe))) == recipe


def test_overrides_reach_into_sections(tmp_path: Path) -> None:
    path = written(tmp_path, "[buffer]\nmax_age = 2\n")
    recipe = load_recipe(path, ["buffer.max_age=0", "env.name=calculator", "env.options.digits=[1,2]"])
    assert (recipe.buffer.max_age, recipe.env.name, recipe.env.options) == (0, "calculator", {"digits": [1, 2]})


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"bufer": {}}, "unknown key 'bufer'; did you mean 'buffer'?"),
        ({"buffer": {"max_agee": 1}}, "unknown key 'buffer.max_agee'; did you mean 'max_age'?"),
        ({"buffer": {"zzz": 1}}, "allowed: groups_per_step, max_age"),
        ({"buffer": {"max_age": "2"}}, "buffer.max_age = '2': input should be a valid integer"),
        ({"buffer": {"max_age": -1}}, "buffer.max_age = -1: input should be greater than or equal to 0"),
        ({"buffer": 3}, "buffer = 3: input should be an object"),
        ({"engine": {"kind": "vlm"}}, "engine.kind = 'vlm': input should be 'native'"),
        ({"engine": {"server": {"count": 2}}}, "engine.kind = 'native' has no server"),
        ({"engine": {"kind": "vllm", "device": "cuda"}}, "device = 'cuda' with engine.kind = 'vllm'"),
        ({"engine": {"kind": "vllm", "parallel": {"dp": 2}}}, "parallel = "),
        ({"engine": {"kind": "vllm", "kv_tokens": 64}}, "the servers' own command line decides it"),
        ({"engine": {"kind": "vllm", "server": {"urls": ["localhost:8000"]}}}, "write http://host:port"),
        ({"engine": {"kind": "vllm", "server": {"urls": ["http://me:pw@x:1"]}}}, "without a key"),
        ({"engine": {"kind": "vllm", "server": {"urls": ["http://a:1", "http://a:1"]}}}, "names a server twice"),
        ({"engine": {"kind": "vllm", "server": {"urls": ["http://a:1", "http://a:1/"]}}}, "names a server twice"),
        ({"engine": {"kind": "vllm", "server": {"urls": ["http://a:70000"]}}}, "Port out of range"),
        ({"engine": {"kind": "vllm", "server": {"urls": ["unix:/" + "x" * 110]}}}, "may have 107 bytes"),
        ({"engine": {"kind": "vllm", "server": {"arguments": ["a\0b"]}}}, "no word a zero byte"),
        ({"engine": {"kind": "vllm", "server": {"python": ""}}}, "no program has an empty name"),
        ({"weights": {"dtype": "float16"}}, "weights.dtype = 'float16': input should be 'float32', 'bfloat16' or"),
        ({"engine": {"kind": "vllm", "server": {"urls": ["http://a:1"], "count": 2}}}, "are not started"),
        ({"engine": {"kind": "vllm", "server": {"key_env": "sk-123"}}}, "not the name of an environment variable"),
        ({"engine": {"kind": "vllm"}}, "weights.refresh_deadline_s = 30.0 is less than engine.server.start_deadline_s"),
        (
            {
                "engine": {"kind": "vllm", "server": {"urls": ["http://a:1"]}},
                "rollout": {"workers": 2},
                "weights": {"refresh_deadline_s": 300.0},
            },
            "engine.server.urls has 1 servers for rollout.workers = 2",
        ),
        ({"train": {"betas": [0.9]}}, "train.betas"),
        ({"rollout": {"episodes": 0}}, "rollout.episodes = 0"),
        ({"critic": {"trunk": "shared"}}, "[critic] with loss.advantages = 'grpo': there is no critic"),
        (
            {"loss": {"advantages": "gae"}, "critic": {"trunk": "shared", "folder": "x"}},
            "folder = 'x' with trunk = 'shared'",
        ),
        ({"loss": {"advantages": "gae"}}, "buffer.no_signal = 'drop' with loss.advantages = 'gae'"),
        ({"rollout": {"episodes": 1}}, "rollout.episodes = 1: one episode has none of its task"),
        ({"rollout": {"episodes": 1}, "buffer": {"no_signal": "keep"}}, "every advantage would be 0"),
        (
            {"engine": {"parallel": {"pp": 2}}},
            "engine.parallel has cp = 1 and pp = 2: an engine is spread over",
        ),
        ({"engine": {"kind": "scripted", "parallel": {"dp": 2}}}, "'scripted' has no model to spread"),
        ({"engine": {"parallel": {"dp": 2}}, "runtime": {"kind": "inline"}}, "'inline' is one process"),
        ({"engine": {"parallel": {"dp": 2, "ep": 3}}}, "engine.parallel: ep = 3 does not divide dp * cp * tp = 2"),
        ({"train": {"device": "gpu"}}, "train.device = 'gpu': string should match pattern '^(cpu|cuda|cuda:"),
        ({"engine": {"device": "cuda:-1"}}, "engine.device = 'cuda:-1': string should match"),
        ({"engine": {"compute": "float16"}}, "engine.compute = 'float16': input should be 'float32' or 'bfloat16'"),
        ({"weights": {"dtype": "bfloat16"}}, "weights.dtype = 'bfloat16' with engine.compute = 'float32'"),
        ({"weights": {"carrier": "collective"}, "runtime": {"kind": "inline"}}, "'inline' is one process; use 'local'"),
        (
            {"weights": {"carrier": "collective"}, "engine": {"kind": "scripted"}},
            "'scripted' takes no parts of tensors",
        ),
        ({"weights": {"carrier": "ipc"}}, "train.device = 'cpu' and engine.device = 'cpu': 'ipc' is for GPUs"),
        ({"weights": {"carrier": "collective", "full_every": 3}}, "weights.full_every = 3 makes deltas"),
        (
            {"weights": {"carrier": "collective"}, "engine": {"replace_every": 2, "parallel": {"dp": 2, "ep": 2}}},
            "engine.replace_every = 2 moves experts",
        ),
        ({"weights": {"bucket_bytes": 3}}, "weights.bucket_bytes = 3: input should be greater than or equal to 64"),
        ({"weights": {"dtype": "float8"}}, "weights.dtype = 'float8' with engine.compute = 'float32'"),
        (
            {"weights": {"dtype": "float8"}, "engine": {"compute": "bfloat16"}, "train": {"parallel": {"dp": 2}}},
            "weights.dtype = 'float8' with 2 trainer ranks and weights.carrier = 'memory'",
        ),
        ({"weights": {"full_every": 0}}, "weights.full_every = 0: input should be greater than or equal to 1"),
        ({"loss": {"overlong": [64, 64]}}, "overlong = [64, 64]: the second length is where 1 is lost, and greater"),
        ({"reward": {"correct": "judge"}}, "env.step_deadline_s = 10 with reward.judge.deadline_s = 60"),
        ({"train": {"routing": "r3"}}, "train.routing = 'r3' with engine.routes = false: no experts would come"),
        ({"train": {"betas": [1.5, 0.9]}}, "train.betas.0 = 1.5: input should be less than 1"),
        ({"train": {"learning_rate": float("inf")}}, "train.learning_rate = inf: input should be a finite number"),
        ({"cluster": {"region": "us-west-2"}}, "cluster: name is not set: every object of a cluster carries it"),
        ({"cluster": {"name": "c"}}, "cluster: region is not set, but name = 'c' says that there is a cluster"),
        ({"cluster": CLUSTER | {"zone": "us-east-1a"}}, "zone = 'us-east-1a' is not in region = 'us-west-2'"),
        ({"cluster": CLUSTER | {"second_zone": "us-west-2b"}}, "second_zone = 'us-west-2b' is zone: EKS wants"),
        ({"cluster": CLUSTER | {"env_image": "env:1"}}, "env_image = 'env:1' with pools ['train']: the pool 'env'"),
        ({"cluster": CLUSTER | {"zone": "us-west-2"}}, "cluster.zone = 'us-west-2': string should match pattern"),
        ({"cluster": CLUSTER | {"storage": "s3://bucket"}}, "cluster.storage = 's3://bucket': string should match"),
        ({"cluster": {"name": "My_Cluster"}}, "cluster.name = 'My_Cluster': string should match pattern"),
        ({"cluster": CLUSTER | {"pools": {"rolout": {}}}}, "= 'rolout': input should be 'train', 'rollout', "),
        ({"cluster": CLUSTER | {"pools": {"env": {"nodes": 2}}}}, "cluster.pools.env: instance is not set: name an"),
        ({"cluster": {"pools": {"env": {"node": 2}}}}, "unknown key 'cluster.pools.env.node'; did you mean 'nodes'?"),
        ({"cluster": {"pools": {"env": {"instance": "c5", "nodes": 3, "most": 2}}}}, "most = 2 is less than nodes = 3"),
        ({"cluster": {"pools": {"env": {"instance": "c5", "capacity": "block"}}}}, "a capacity block has an id"),
        ({"cluster": {"pools": {"env": {"instance": "c5", "reservation": "cr-0123456789"}}}}, "set both, or neither"),
        ({"run": {"seed": tomllib}}, "numbers, strings, booleans, lists and tables only"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(tree: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as fault:
        check_recipe(tree)
    assert says in str(fault.value)


@pytest.mark.parametrize("override", ["max_age=1", "buffer.max_age", "=1", "buffer.=1", ".x=1"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_recipe(written(tmp_path, ""), [override])


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a value, not a section"):
        load_recipe(written(tmp_path, ""), ["run.seed=1", "run.seed.deep=2"])


def test_a_missing_recipe_and_broken_toml_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError, match="does not exist"):
            load_recipe(path)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_recipe(written(tmp_path, "[run\nseed=1"))


def test_knobs_stay_few() -> None:
    """Every knob is one more thing to explain; this number moves only on purpose."""
    knobs = {name: len(section.annotation.model_fields) for name, section in Recipe.model_fields.items()}
    # What a cluster needs to know is asked of those who have one, and of nobody else: counted apart.
    assert knobs.pop("cluster") + len(Pool.model_fields) <= 26
    assert sum(knobs.values()) <= 145


def test_a_recipe_that_makes_a_model_is_checked_by_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    path.write_text("[sft]\nupdates = 5\n[look]\nname = 'calculator'\n", encoding="utf-8")
    recipe = load_sft_recipe(path, ["sft.seed=3"])
    assert (recipe.sft.updates, recipe.sft.seed, recipe.look and recipe.look.name) == (5, 3, "calculator")
    with pytest.raises(ConfigError, match=r"'sft.update'; did you mean 'updates'"):
        load_sft_recipe(path, ["sft.update=3"])
    with pytest.raises(ConfigError, match=r"(?s)unknown key 'sft'.*contraflow sft RECIPE"):
        load_recipe(path)
    path.write_text("[run]\nsteps = 5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)unknown key 'run'.*contraflow run"):
        load_sft_recipe(path)


@pytest.mark.parametrize("url", ["http://me:sesame@x:1", "http://x:1/?key=sesame", "http://x:1#sesame"])
def test_a_key_in_an_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="without a key") as fault:
        check_recipe({"engine": {"kind": "vllm", "server": {"urls": [url]}}})
    assert "sesame" not in str(fault.value)
