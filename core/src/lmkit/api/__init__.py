"""The only public surface for plugins: specs to register, requests to answer, protocols to implement.

Importing this imports neither torch nor numpy. Everything else in lmkit, except `lmkit.layers` (for models) and
`lmkit.testing`, is free to move.
"""

from lmkit.api.checkpoint import Checkpoint, CheckpointOptions
from lmkit.api.device import DeviceInfo, Unavailable
from lmkit.api.dtypes import canonical, itemsize
from lmkit.api.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineBusy,
    EngineDead,
    EngineError,
    ErrorInfo,
    InvalidParam,
    LmkitError,
    PluginError,
    RequestError,
    RequestTooLarge,
    SelectionError,
    TemplateFailed,
    UnknownKey,
    UnknownName,
    UnsupportedModel,
    WeightMismatch,
    nearest,
)
from lmkit.api.execution import (
    Architecture,
    AttentionBackend,
    AttnBatch,
    AttnPlan,
    AttnPlanner,
    Buffer,
    BuildContext,
    Collectives,
    Control,
    DropAdapter,
    Event,
    Executor,
    Failure,
    Graphs,
    KVConfig,
    LinearKernel,
    LoadAdapter,
    LoadedModel,
    Loader,
    LogitsProcessor,
    Model,
    PackedWeight,
    Platform,
    Profile,
    Progress,
    Proposer,
    QuantFormat,
    QuantScheme,
    Reply,
    ResetCache,
    RowOps,
    SampleContext,
    StepInputs,
    StepLimits,
    TensorEntry,
    Worker,
    WorkerFacts,
)
from lmkit.api.hooks import hookimpl
from lmkit.api.model import AttnNeed, KVSpec, LayerInfo, LinearSpec, ModelInfo, ParamSpec, WeightRule
from lmkit.api.null import NullCollectives, NullEvent, NullGraphs
from lmkit.api.params import Grammar, SamplingParams
from lmkit.api.refusal import Refusal, Refused
from lmkit.api.requests import (
    AttentionRequest,
    ExecutorRequest,
    LoaderRequest,
    ModelRequest,
    OpRequest,
    ParserRequest,
    QuantizationRequest,
    SelectRequest,
)
from lmkit.api.resolved import Choice, Derived, ResolvedPlan
from lmkit.api.scheduling import (
    CompiledGrammar,
    Gate,
    GrammarBackend,
    Hold,
    KVConnectorSched,
    KVConnectorWorker,
    KVEvent,
    Match,
    Matcher,
    OrderPolicy,
    RequestView,
    SchedLimits,
    Scheduler,
)
from lmkit.api.specs import (
    ANY,
    INTERFACES,
    KIND_OF,
    AttentionSpec,
    CommandSpec,
    ConfigProposal,
    Dims,
    DoctorCheck,
    ExecutorSpec,
    GrammarBackendSpec,
    KVConnectorSpec,
    LoaderSpec,
    ModelSpec,
    OpSpec,
    Origin,
    PlatformSpec,
    ProposerSpec,
    QuantizationSpec,
    Range,
    ReasoningParserSpec,
    Ref,
    SchedulerSpec,
    Spec,
    Tier,
    ToolParserSpec,
    multiple_of,
    one_of,
)
from lmkit.api.text import (
    ParseEvent,
    ParserFormat,
    Reasoning,
    StreamParser,
    TagFormat,
    Text,
    Tokenizer,
    ToolArgs,
    ToolChoice,
    ToolDef,
    ToolEnd,
    ToolStart,
)
from lmkit.api.wire import (
    EngineRequest,
    FinishReason,
    GrammarMasks,
    MediaItem,
    NewRow,
    RowLogprobs,
    RowWork,
    SchedStats,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprob,
)

__all__ = [name for name in dir() if not name.startswith("_")]
