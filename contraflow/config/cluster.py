"""The section for a run on Amazon EKS: the cluster, where things last, and the machines of each pool.

A recipe for one machine has none. The objects of a cluster are written from it, and the run itself does not read it.
What the sizes must add up to is checked when they are written, with the facts of the instance types.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contraflow.config.base import Count, Section

PoolName = Literal["train", "rollout", "reward", "env", "buffer", "control"]
Label = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?)?$")]  # fits every object made from it


class Pool(Section):
    """The machines of one role: a node group of its own."""

    instance: str = ""  # EC2 type, such as p5en.48xlarge
    nodes: Count = 1  # all of them are used from the start
    most: Annotated[int, Field(ge=0)] = 0  # nodes it may grow to; 0: as many as `nodes`
    capacity: Literal["on_demand", "spot", "block"] = "on_demand"  # block: reserved hours, with `reservation`
    reservation: Annotated[str, Field(pattern=r"^(cr-[0-9a-f]{8,17})?$")] = ""  # id of the capacity block
    group: Label = ""  # name of the node group; empty: the pool's
    efa: Annotated[int, Field(ge=0)] = 0  # interfaces each node's pod asks for; 0: all of the type
    pods: Count = 1  # servers on one node, for the pool `env`
    disk_gb: Annotated[int, Field(ge=20)] = 200  # root volume; an image of 20 GB wants 150
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0  # of one node, for the bill in the order of work; 0: not known

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if not self.instance:
            raise ValueError("instance is not set: name an EC2 type, such as instance = 'p5en.48xlarge'")
        if 0 < self.most < self.nodes:
            raise ValueError(f"most = {self.most} is less than nodes = {self.nodes}; use 0 for a pool that stays")
        if (self.capacity == "block") != bool(self.reservation):
            raise ValueError(
                f"capacity = {self.capacity!r} with reservation = {self.reservation!r}: a capacity block has an id, and"
                " nothing else has; set both, or neither"
            )
        return self


class Cluster(Section):
    """An EKS cluster for this run."""

    name: Label = ""  # of the cluster; empty: this recipe is not for one
    region: Annotated[str, Field(pattern=r"^([a-z]{2}(-[a-z]+)+-[0-9])?$")] = ""  # such as us-west-2
    zone: Annotated[str, Field(pattern=r"^([a-z]{2}(-[a-z]+)+-[0-9][a-z])?$")] = ""  # all nodes; EFA does not leave it
    second_zone: Annotated[str, Field(pattern=r"^([a-z]{2}(-[a-z]+)+-[0-9][a-z])?$")] = (
        ""  # EKS wants two; no nodes in it
    )
    kubernetes: Annotated[str, Field(pattern=r"^1\.[0-9]{2}$")] = "1.34"  # version
    namespace: Label = "contraflow"  # of everything that is the run's
    storage: Annotated[
        str, Field(pattern=r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[A-Za-z0-9._/-]*[A-Za-z0-9])?$")
    ] = ""  # s3://bucket/prefix of this run alone: cuts, weights and the model to start from
    gpu_image: str = ""  # with a tag or digest; it holds CUDA, NCCL, the EFA libraries and this package
    cpu_image: str = ""  # for pools without GPUs
    env_image: str = ""  # of the environment's server, for the pool `env`; answers at http://env.NAMESPACE-env:8080
    env_command: tuple[str, ...] = ()  # of that server, one word each; empty: what the image starts
    nodes_by: Literal["eksctl", "karpenter"] = "eksctl"  # managed node groups, or node pools that come when asked for
    queue: Label = ""  # Kueue queue that admits the job; empty: none
    model_config_file: str = ""  # config.json for the checks, from the recipe's folder, where model.folder is elsewhere
    pools: dict[PoolName, Pool] = {}  # see below

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not self.name:
            if self != Cluster.model_construct():
                raise ValueError("name is not set: every object of a cluster carries it, so nothing can be made")
            return self
        for key in ("region", "zone", "second_zone", "storage", "gpu_image", "cpu_image", "namespace", "pools"):
            if not getattr(self, key):
                raise ValueError(f"{key} is not set, but name = {self.name!r} says that there is a cluster; set it")
        for key, zone in (("zone", self.zone), ("second_zone", self.second_zone)):
            if zone[:-1] != self.region:
                raise ValueError(
                    f"{key} = {zone!r} is not in region = {self.region!r}: name one of the region, such as"
                    f" {self.region + 'b'!r}"
                )
        if self.zone == self.second_zone:
            raise ValueError(
                f"second_zone = {self.second_zone!r} is zone: EKS wants subnets in two zones, though all nodes are in"
                " zone; name another one of the region"
            )
        if ("env" in self.pools) != bool(self.env_image):
            raise ValueError(
                f"env_image = {self.env_image!r} with pools {sorted(self.pools)}: the pool 'env' runs that image, and"
                " nothing else does; set both, or neither (environments then run in the rollout workers)"
            )
        return self
