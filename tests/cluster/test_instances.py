"""Facts of instance types agree with each other and with published totals; unknown types are named with the nearest."""

import pytest

from contraflow.cluster.instances import INSTANCES, find_instance
from contraflow.errors import ConfigError


@pytest.mark.parametrize("name", INSTANCES)
def test_the_facts_of_a_type_agree_with_each_other(name: str) -> None:
    facts = INSTANCES[name]
    assert facts.name == name
    assert (facts.gpus > 0) == (facts.gpu is not None)
    assert facts.efa_least <= facts.efa <= facts.efa_least + 1
    assert (facts.efa > 0) == (facts.efa_least > 0)
    assert facts.nvlink_domain == 0 or facts.nvlink_domain % facts.gpus == 0
    assert not facts.efa_gda or facts.efa
    assert 0.8 * facts.vcpu < facts.allocatable_vcpu < facts.vcpu
    assert 0.7 * facts.memory_gib < facts.allocatable_gib < facts.memory_gib
    if facts.gpu is not None:
        assert facts.gpu.fp8_tflops in (0, pytest.approx(2 * facts.gpu.bf16_tflops, rel=0.01))
        assert (facts.gpu.nvlink_gb_s > 0) == (facts.nvlink_domain > 0)


@pytest.mark.parametrize(
    ("name", "per_gpu_gb_s"), [("p5en.48xlarge", 50), ("p6-b200.48xlarge", 50), ("p6-b300.48xlarge", 100)]
)
def test_the_network_of_one_gpu_is_the_published_one(name: str, per_gpu_gb_s: float) -> None:
    assert find_instance(name).gpu_network_gb_s == per_gpu_gb_s


def test_what_pods_can_have_is_what_the_rules_of_the_kubelet_leave() -> None:
    """By hand: 192 vCPU keep 0.06 + 0.01 + 0.01 + 188 * 0.0025 = 0.55 back, 250 pods 255 + 2750 MiB."""
    p5en = find_instance("p5en.48xlarge")
    assert p5en.allocatable_vcpu == pytest.approx(192 - 0.55 - 1)
    assert p5en.allocatable_gib == pytest.approx(2048 * 0.925 - 3005 / 1024 - 0.1 - 2)


def test_every_type_of_the_published_runs_is_there() -> None:
    counts = {"p4d.24xlarge": 4, "p5.48xlarge": 32, "p5e.48xlarge": 32, "p5en.48xlarge": 16, "p6-b300.48xlarge": 16}
    assert {name: find_instance(name).efa for name in counts} == counts
    assert find_instance("p5en.48xlarge").efa_least == 15


def test_an_unknown_type_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'p5n.48xlarge' is not known: did you mean 'p5en?.48xlarge'\?"):
        find_instance("p5n.48xlarge")
    with pytest.raises(ConfigError, match=r"known types: p4d\.24xlarge"):
        find_instance("toaster")
