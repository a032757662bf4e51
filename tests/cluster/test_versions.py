"""The list of versions breaks none of its own rules, each known-bad pair is found, and libraries are really asked."""

import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from contraflow.cluster.loaded import (
    gdrcopy_version,
    installer_version,
    libfabric_version,
    loaded_versions,
    package_version,
    plugin_version,
)
from contraflow.cluster.versions import IN_IMAGE, KUBERAY_CHART, MATRIX, RULES, bad_pairs, differences, holds, number

ROOT = Path(__file__).parents[2]
NODE = {"efa_kmod": "3.3.0", "gin": "5", "sm": "10.3"}

BAD = {
    "deepep-nccl": {"deepep": "2.0.0", "nccl": "2.29.7"},
    "deepep-torch": {"deepep": "2.0.0", "torch": "2.9.1"},
    "gda-installer": {"gin": "5", "efa_installer": "1.49.0"},
    "gda-plugin": {"gin": "5", "aws_ofi_nccl": "1.19.0"},
    "gda-nccl": {"gin": "5", "nccl": "2.30.4"},
    "gda-libfabric": {"gin": "5", "libfabric": "2.5"},
    "gda-module": {"gin": "5", "efa_kmod": "3.2.1"},
    "ofi-gdrcopy": {"aws_ofi_nccl": "1.21.0", "gdrcopy": "2.4"},
    "installer-1.34": {"efa_installer": "1.34.0"},
    "installer-1.38": {"efa_installer": "1.38.0"},
    "blackwell-ptxas": {"sm": "10.3", "toolkit": "13.0.2"},
    "kernel-dmabuf": {"kernel": "5.10.234-225.895.amzn2"},
    "ray-token": {"ray": "2.49.2"},
}


def test_the_matrix_breaks_none_of_its_rules_even_where_gpus_post_transfers() -> None:
    assert list(bad_pairs(MATRIX)) == []
    assert list(bad_pairs({**MATRIX, **NODE})) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_each_known_bad_pair_is_found_and_explained(rule: object) -> None:
    (line,) = bad_pairs(BAD[rule.id])  # type: ignore[attr-defined]
    assert line.startswith(f"{rule.id}: ")  # type: ignore[attr-defined]
    assert rule.why in line  # type: ignore[attr-defined]
    assert rule.source in line  # type: ignore[attr-defined]


def test_the_published_stack_would_have_been_told_why_its_gpus_cannot_post() -> None:
    """The stack of AWS' own description: EFA 1.49, NCCL 2.31.2, DeepEP 2.0."""
    theirs = {"torch": "2.12.1", "cuda": "13.0", "nccl": "2.31.2", "efa_installer": "1.49.0", "deepep": "2.0.0"}
    assert list(bad_pairs(theirs)) == []
    assert [line.split(":")[0] for line in bad_pairs(theirs | {"gin": "5"})] == ["gda-installer"]


def test_the_operator_knows_what_the_objects_ask_of_it() -> None:
    assert holds(KUBERAY_CHART, ">=", "1.5.1")  # before, `authOptions` was dropped, and the cluster open


def test_versions_of_an_image_are_compared_with_the_matrix() -> None:
    assert list(differences(MATRIX, "gpu")) == list(differences(MATRIX, "cpu")) == []
    older = {name: text for name, text in MATRIX.items() if name != "gdrcopy"} | {"nccl": "2.28.9"}
    said = list(differences(older, "gpu"))
    assert "nccl: 2.28.9 is loaded, 2.31.2 is wanted: a later install may have replaced it" in said
    assert "gdrcopy: not found, 2.5 is wanted; is this the gpu image?" in said
    assert len(said) == 2
    assert set(IN_IMAGE["gpu"]) < set(MATRIX)


versions = st.lists(st.integers(0, 99), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@given(have=versions, wanted=versions)
def test_comparing_versions_is_comparing_numbers(have: str, wanted: str) -> None:
    from packaging.version import Version

    assert holds(have, ">=", wanted) == (Version(have) >= Version(wanted))
    assert holds(have, "<", wanted) != holds(have, ">=", wanted)
    assert holds(have, "==", wanted) != holds(have, "!=", wanted)
    assert holds(wanted, "==", wanted)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("v2.5.2", (2, 5, 2)),
        ("2.13.0+cu130", (2, 13, 0)),
        ("1.18.0-aws", (1, 18, 0)),
        ("3.3.0g", (3, 3, 0)),
        ("5", (5,)),
    ],
)
def test_versions_are_read_as_vendors_write_them(text: str, parts: tuple[int, ...]) -> None:
    assert number(text) == parts


@pytest.mark.parametrize("text", ["", "main", "+cu130"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no version"):
        number(text)


def library(tmp_path: Path, name: str, code: str) -> str:
    """A shared library of this code, to be loaded and asked like the real one."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / f"{name}.c"
    source.write_text(code, encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / name, source], check=True)
    return str(tmp_path / name)


def test_libfabric_is_asked(tmp_path: Path) -> None:
    path = library(tmp_path, "libfabric.so.1", "unsigned fi_version(void) { return 2u << 16 | 6u; }")
    assert libfabric_version(path) == "2.6"


def test_gdrcopy_is_asked(tmp_path: Path) -> None:
    code = "void gdr_runtime_get_version(int *major, int *minor) { *major = 2; *minor = 5; }"
    assert gdrcopy_version(library(tmp_path, "libgdrapi.so.2", code)) == "2.5"


def test_a_library_that_is_not_there_or_does_not_know_is_no_version(tmp_path: Path) -> None:
    assert libfabric_version("libno-such-thing.so.1") == ""
    assert gdrcopy_version(library(tmp_path, "libother.so", "int other(void) { return 1; }")) == ""


def test_what_the_efa_installer_left_is_read(tmp_path: Path) -> None:
    file = tmp_path / "efa_installed_packages"
    assert installer_version(file) == ""
    file.write_text("# EFA installer version: 1.47.0\nefa-config-1.18-1.amzn2023.noarch\n", encoding="utf-8")
    assert installer_version(file) == "1.47.0"
    file.write_text("nothing of it\n", encoding="utf-8")
    assert installer_version(file) == ""


def test_the_plugins_version_is_found_in_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "libnccl-net-ofi.so"
    assert plugin_version(file) == ""
    file.write_bytes(b"")
    assert plugin_version(file) == ""
    file.write_bytes(b"\x7fELF" + bytes(5000) + b"NET/OFI Initializing aws-ofi-nccl 1.18.0-aws\0" + bytes(99))
    assert plugin_version(file) == "1.18.0"


def test_what_is_loaded_here_is_what_is_installed_here(tmp_path: Path) -> None:
    found = loaded_versions(tmp_path / "none", tmp_path / "none")
    assert found["torch"] == version("torch").split("+")[0]
    assert "aws_ofi_nccl" not in found
    assert package_version("no-such-package-anywhere") == ""


def test_the_command_says_what_differs_and_fails(tmp_path: Path) -> None:
    from contraflow.cli import app

    said = CliRunner().invoke(app, ["eks", "versions"])
    assert said.exit_code == 1
    assert "efa_installer: not found, 1.50.0 is wanted; is this the gpu image?" in said.output
    assert CliRunner().invoke(app, ["eks", "versions", "--image", "tpu"]).exit_code == 1


@pytest.mark.parametrize("image", ["gpu", "cpu"])
def test_an_image_is_made_of_the_matrix_and_looks_at_itself_last(image: str) -> None:
    text = (ROOT / f"docker/{image}.Dockerfile").read_text(encoding="utf-8")
    names = {"CUDA_TOOLKIT": "toolkit"}
    for name, value in re.findall(r"^ARG ([A-Z_]+)=([0-9.]+)$", text, re.MULTILINE):
        component = names.get(name, name.lower())
        assert holds(value, "==", MATRIX[component]), name
    pinned = set(re.findall(r"^ARG ([A-Z_]+)=[0-9.]+$", text, re.MULTILINE))
    assert pinned >= (
        {"CUDA_TOOLKIT", "TORCH", "NCCL", "NVSHMEM", "EFA_INSTALLER", "GDRCOPY"} if image == "gpu" else {"RAY"}
    )
    steps = re.findall(r"^(FROM|RUN|COPY|ARG|ENV) ?(.*)$", text, re.MULTILINE)
    assert steps[-1] == ("RUN", f"contraflow eks versions --image {image}")
    assert ":latest" not in text
    assert all(":" in what for step, what in steps if step == "FROM")
    if image == "gpu":  # what a later install may have replaced is put back by the last install of all
        assert steps[-2][1].startswith("pip install --no-deps --force-reinstall nvidia-nccl-cu13==${NCCL}")
