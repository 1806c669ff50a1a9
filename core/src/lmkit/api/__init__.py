"""The only public surface for plugins: specs to register, requests to answer, protocols to implement.

Importing this imports neither torch nor numpy. Everything else in lmkit, except `lmkit.layers` (for models),
`lmkit.killable` (for work on what strangers wrote) and the libraries, is free to move.
"""

from lmkit.api.checkpoint import Checkpoint, CheckpointOptions
from lmkit.api.device import DeviceInfo, Unavailable
from lmkit.api.dtypes import canonical, itemsize, kv_scale_bytes
from lmkit.api.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineBusy,
    EngineDead,
    EngineError,
    ErrorInfo,
    GrammarError,
    InvalidParam,
    LmkitError,
    PluginError,
    RequestError,
    RequestTooLarge,
    SelectionError,
    TemplateFailed,
    UnknownArchitecture,
    UnknownKey,
    UnknownName,
    UnsupportedModel,
    UnsupportedTask,
    WeightMismatch,
    info_of,
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
    ForgetRows,
    Graphs,
    KVConfig,
    LoadAdapter,
    LoadedModel,
    Loader,
    LogitsProcessor,
    Model,
    Platform,
    Progress,
    Reply,
    ResetCache,
    RotatingAttention,
    SampleContext,
    StateBatch,
    StepInputs,
    StepLimits,
    TensorEntry,
    Worker,
    WorkerFacts,
)
from lmkit.api.hooks import hookimpl
from lmkit.api.json_schema import keywords, subschemas
from lmkit.api.model import (
    AttnNeed,
    DenseInfo,
    KVSpec,
    LayerInfo,
    LinearSpec,
    ModelInfo,
    NormKind,
    ParamSpec,
    PoolerInfo,
    StateTensor,
    WeightRule,
)
from lmkit.api.null import NullCollectives, NullEvent, NullGraphs
from lmkit.api.operators import (
    DrawParams,
    ExpertKernel,
    IntegerFormat,
    Integers,
    LinearKernel,
    PackedWeight,
    QuantFormat,
    QuantScheme,
    Routing,
    RowOps,
)
from lmkit.api.params import Grammar, PoolingParams, PoolingTask, SamplingParams, Thinking
from lmkit.api.refs import load_target
from lmkit.api.refusal import Refusal, Refused
from lmkit.api.resolved import Choice, Derived, ResolvedPlan
from lmkit.api.scheduling import (
    CompiledGrammar,
    Gate,
    GrammarBackend,
    Matcher,
    OrderPolicy,
    RequestView,
    SchedLimits,
    Scheduler,
    Vocabulary,
)
from lmkit.api.specs import (
    ANY,
    BenchmarkCase,
    BenchmarkSpec,
    ConfigProposal,
    Dims,
    DoctorCheck,
    Origin,
    Range,
    Ref,
    SelectRequest,
    Spec,
    Tier,
    multiple_of,
    one_of,
)
from lmkit.api.text import (
    CallBody,
    ChannelFormat,
    ChatWriter,
    JsonCalls,
    LooseObject,
    NamedJson,
    Params,
    ParseEvent,
    ParserFormat,
    ParseWarning,
    PyCalls,
    Reasoning,
    ReasoningFormat,
    StreamParser,
    Text,
    Tokenizer,
    ToolArgs,
    ToolChoice,
    ToolDef,
    ToolEnd,
    ToolFormat,
    ToolStart,
)
from lmkit.api.wire import (
    EngineRequest,
    FinishReason,
    GrammarMasks,
    MediaItem,
    NewRow,
    Pooled,
    RowLogprobs,
    RowWork,
    SchedStats,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprob,
)
from lmkit.kinds.attention import AttentionRequest, AttentionSpec
from lmkit.kinds.dialect import DialectSpec
from lmkit.kinds.executor import ExecutorRequest, ExecutorSpec
from lmkit.kinds.grammar import GrammarBackendSpec
from lmkit.kinds.loader import LoaderRequest, LoaderSpec
from lmkit.kinds.model import ModelRequest, ModelSpec
from lmkit.kinds.op import OpRequest, OpSpec
from lmkit.kinds.parsers import ParserRequest, ParserSpec
from lmkit.kinds.platform import PlatformSpec
from lmkit.kinds.quantization import QuantizationRequest, QuantizationSpec
from lmkit.kinds.reasoning_parser import ReasoningParserSpec
from lmkit.kinds.scheduler import SchedulerSpec
from lmkit.kinds.structured_output import StructuredOutput, StructuredOutputSpec
from lmkit.kinds.template import TemplateRequest, TemplateSpec
from lmkit.kinds.tokenizer import TokenizerRequest, TokenizerSpec
from lmkit.kinds.tool_parser import ToolParserSpec

__all__ = [name for name in dir() if not name.startswith("_")]
