"""Section for a served engine of several GPUs or nodes, which others start: what its command lines are written from."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contraflow.config.base import Count, Section

Port = Annotated[int, Field(ge=1, le=65535)]
Phase = Literal["both", "prefill", "decode"]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]+$")]
Interface = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]*$")]


class Launch(Section):
    """How one served engine lies over nodes: experts over all its GPUs, attention over `tp` of them."""

    nodes: Count = 1  # machines of one engine
    gpus_per_node: Count = 8  # all of them are used
    tp: Count = 1  # GPUs that share one copy of the attention; the copies are data parallel
    phase: Phase = "both"  # prefill and decode of one model may be two engines behind a router of their own
    all_to_all: Literal["auto", "collectives", "deepep"] = "auto"  # to the experts; auto: deepep on several nodes
    wire: Literal["bf16", "fp8"] = "bf16"  # precision of tokens on their way to experts, by deepep
    fabric: Literal["infiniband", "efa"] = "infiniband"  # between nodes
    interface: Interface = ""  # by which ranks find each other, such as eth0; empty: the libraries choose
    address: Host = "127.0.0.1"  # of node 0, for the other nodes
    port: Port = 8000  # of its HTTP interface
    rendezvous_port: Port = 13345  # at node 0, where ranks meet
    redundant_experts: Annotated[int, Field(ge=0)] = 0  # replicas of popular experts, over all GPUs; needs frozen
    frozen: bool = False  # its weights never change: an engine that judges, not the policy

    @property
    def ranks(self) -> int:
        """GPUs in all, which share out the experts."""
        return self.nodes * self.gpus_per_node

    @property
    def copies(self) -> int:
        """Of the attention: the data-parallel size."""
        return self.ranks // self.tp

    @property
    def deepep(self) -> bool:
        """Whether tokens reach experts by DeepEP."""
        return self.all_to_all == "deepep" or (self.all_to_all == "auto" and self.nodes > 1)

    @model_validator(mode="after")
    def _nodes_fit(self) -> Self:
        if self.gpus_per_node % self.tp:
            raise ValueError(
                f"tp = {self.tp} does not divide gpus_per_node = {self.gpus_per_node}: attention is summed up over tp"
                " in every layer and stays inside a node"
            )
        if self.nodes > 1 and self.address in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
            raise ValueError(
                f"address = {self.address!r} with nodes = {self.nodes}: give the host name or IP under which the other"
                " nodes reach node 0"
            )
        if self.redundant_experts and not self.frozen:
            raise ValueError(
                f"redundant_experts = {self.redundant_experts} with frozen = false: served engines load new weights in"
                " the experts' first places while tokens go to where they have been moved since, so a refresh puts"
                " weights into the wrong experts; leave it at 0, or say frozen = true of an engine that is never"
                " refreshed"
            )
        return self
