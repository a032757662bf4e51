"""Failures, typed by the boundary they crossed.

A broken episode is data (counted, shown, the run goes on); a broken worker is an event (named, acted on by role);
a broken configuration or checkpoint stops the run before anything is lost. Every message names the thing, the value,
what is allowed and what to do.
"""


class ContraflowError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(ContraflowError):
    """A recipe, an override or a named part does not fit; nothing was started."""


class ModelError(ContraflowError):
    """A model folder, tensor or shape is not what the model expects."""


class DispatchError(ContraflowError):
    """Tokens could not be carried to their experts and back: wrong shapes, a used handle, or lost rows."""


class TaskError(ContraflowError):
    """An environment raised, answered nonsense or did not answer; costs one episode."""


class RewardError(ContraflowError):
    """A reward raised or gave a number that is not finite; costs one episode."""


class JudgeError(RewardError):
    """A judging model gave no score; costs one episode.

    Attributes: `judge` its address, `kind` how: "busy" (429, 5xx), "unreachable" (no connection, or it broke), "late"
    (no verdict by a deadline), "refused" (it said no, for good), "malformed" (no score in what it said); `text` more.
    """

    def __init__(self, judge: str, kind: str, text: str) -> None:
        super().__init__(f"judge {judge} {kind}: {text}")
        self.judge = judge
        self.kind = kind
        self.text = text


class ScorerError(RewardError):
    """A reward model gave no reward: late, dead for too long, or it could not read what it was given. One episode."""


class EngineError(ContraflowError):
    """An engine could not answer a request, such as a prompt longer than its context."""


class ServerError(EngineError):
    """A server that an engine relies on failed.

    Attributes: `server` its address, `kind` how: "unreachable" (no connection, or it broke), "late" (silent beyond a
    deadline), "refused" (it said no), "malformed" (an answer that cannot be), "stale" (it holds other weights).
    """

    def __init__(self, server: str, kind: str, text: str) -> None:
        super().__init__(f"server {server} {kind}: {text}")
        self.server = server
        self.kind = kind


class NoticeError(ContraflowError):
    """The service that knows whether this machine is to go cannot be asked, or answers what cannot be."""


class CarrierError(ContraflowError):
    """A weight version did not arrive whole: missing, torn, of another shape, or failing its proof."""


class VersionGone(CarrierError):
    """A weight version can't be read because it was retired, or its publisher never completed it."""


class BlobError(ContraflowError):
    """A blob could not be read, written, listed or deleted."""


class BlobMissing(BlobError):
    """There is no blob of this key."""


class BlobExists(BlobError):
    """A blob of this key is there already, and the write was to create it."""


class CheckpointError(ContraflowError):
    """A checkpoint could not be written or read whole; the previous one is untouched."""


class CutTaken(CheckpointError):
    """Another writer committed a cut of this name, or forbade it, before this one: this writer's run must stop."""


class CutTorn(CheckpointError):
    """A cut's manifest or one of its parts is missing, truncated or altered."""


class TrainingError(ContraflowError):
    """A training step gave a loss or gradient that is not finite; the step was not applied."""


class RoutesError(TrainingError):
    """Experts that an engine recorded cannot be taken again: of another model, of another length, or not there."""


class LedgerError(ContraflowError):
    """The record of what happened to each group cannot be read or written, or a request contradicts it."""


class PayloadError(LedgerError):
    """The recorded payload of a group is missing, truncated or altered."""


class ReplayError(ContraflowError):
    """What a run recorded does not come out again: other tokens, or other log-probabilities."""


class RunFolderError(ContraflowError):
    """The run folder is in use by another run, or does not hold what a resume needs."""


class ClusterError(ContraflowError):
    """The cluster that workers live on cannot be reached, refuses the token, has no place, or lost its head."""


class ChannelError(ContraflowError):
    """A call could not be carried to a worker or back."""


class RemoteError(ContraflowError):
    """A worker's method raised an exception that is not of this package.

    Failures of this package keep their own type across a channel; only foreign exceptions arrive as this one.
    Attributes: `worker` and `method` that raised, `type` and `text` of the exception, `traceback` as the worker saw it.
    """

    def __init__(self, worker: str, method: str, *, type: str, text: str, traceback: str = "") -> None:
        super().__init__(f"worker {worker!r}, method {method!r}: {type}: {text}\n{traceback}".rstrip())
        self.worker = worker
        self.method = method
        self.type = type
        self.text = text
        self.traceback = traceback


class WorkerDied(ContraflowError):
    """A worker process ended or stopped answering without being asked to.

    Attributes: `worker` its name, `detail` how it ended (exit code or signal) and what it was doing.
    """

    def __init__(self, worker: str, detail: str) -> None:
        super().__init__(f"worker {worker!r} died: {detail}")
        self.worker = worker
        self.detail = detail


class DeadlineExceeded(ContraflowError):
    """A wait ran out of time.

    Attributes: `owner` who waited, `cause` for what, `seconds` how long.
    """

    def __init__(self, owner: str, cause: str, seconds: float) -> None:
        super().__init__(f"{owner} waited {seconds:g} s for {cause}")
        self.owner = owner
        self.cause = cause
        self.seconds = seconds
