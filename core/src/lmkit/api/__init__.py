"""The only public surface for plugins: specs to register, requests to answer, protocols to implement.

Importing this imports neither torch nor numpy. Everything else in lmkit, except `lmkit.checkpoint` (for loaders),
`lmkit.memory` (for executors), `lmkit.files` (for what strangers wrote), `lmkit.prompts` (for
renderers) and the libraries, is free to move.
"""

from lmkit.api.hooks import hookimpl
from lmkit.contracts.checkpoint import Checkpoint, CheckpointOptions
from lmkit.contracts.config import EngineConfig
from lmkit.contracts.describe import describe_model
from lmkit.contracts.device import DeviceInfo, Unavailable
from lmkit.contracts.dtypes import canonical, itemsize, kv_scale_bytes
from lmkit.contracts.errors import (
    CannotSplit,
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
    error_of,
    info_of,
    is_interrupt,
    nearest,
)
from lmkit.contracts.execution import (
    Architecture,
    AttnBatch,
    AttnPlan,
    Buffer,
    BuildContext,
    Collectives,
    Control,
    DropAdapter,
    Event,
    Failure,
    ForgetRows,
    Graphs,
    KVConfig,
    LoadAdapter,
    Model,
    Profile,
    Progress,
    Reply,
    ResetCache,
    Sleep,
    StageWeights,
    StateBatch,
    StepInputs,
    StepLimits,
    UseWeights,
    Wake,
    WorkAhead,
    WorkerFacts,
)
from lmkit.contracts.guard import blame, blaming, guard, make_target
from lmkit.contracts.model import (
    AttnNeed,
    DenseInfo,
    KVSpec,
    LayerInfo,
    LinearSpec,
    ModelInfo,
    NormKind,
    ParamSpec,
    PoolerInfo,
    Reduction,
    StateTensor,
    WeightRule,
)
from lmkit.contracts.null import NullCollectives, NullEvent, NullGraphs
from lmkit.contracts.operators import DrawParams, IntegerFormat, Integers, QuantFormat, Routing, RowOps
from lmkit.contracts.params import (
    MAX_BIAS,
    MAX_DIMENSIONS,
    MAX_LOGPROBS,
    MAX_STOP,
    MAX_STOP_IDS,
    MAX_TOKENS,
    MIN_REPETITION,
    Beams,
    Grammar,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    Thinking,
)
from lmkit.contracts.pooling import class_pooler, decoder_name, head_linears
from lmkit.contracts.refs import load_target, owner_of
from lmkit.contracts.refusal import Refusal, Refused
from lmkit.contracts.resolved import Choice, Derived, Draft, ResolvedPlan
from lmkit.contracts.scheduling import Admitted, CompiledGrammar, Gate, Matcher, SchedLimits, Vocabulary
from lmkit.contracts.schemas import checked_schema, schema_keywords
from lmkit.contracts.specs import (
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
from lmkit.contracts.text import (
    ChatWriter,
    DeclaredFormat,
    ParseEvent,
    ParserFormat,
    ParseWarning,
    Reasoning,
    StreamParser,
    Text,
    ToolArgs,
    ToolChoice,
    ToolCut,
    ToolDef,
    ToolEnd,
    ToolStart,
)
from lmkit.contracts.tokenizer import MARK, BytesDetokenizer, Detokenizer, Tokenizer
from lmkit.contracts.wire import (
    EngineRequest,
    FinishReason,
    GrammarMasks,
    MediaItem,
    NewRow,
    Pooled,
    RowLogprobs,
    RowWork,
    SchedStats,
    Started,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprob,
)
from lmkit.kinds.attention import (
    AttentionBackend,
    AttentionRequest,
    AttentionSpec,
    AttnPlanner,
    RotatingAttention,
    TreeAttention,
)
from lmkit.kinds.dialect import DialectSpec
from lmkit.kinds.executor import Executor, ExecutorRequest, ExecutorSpec
from lmkit.kinds.grammar import GrammarBackend, GrammarBackendSpec
from lmkit.kinds.kv_connector import CachedBlock, KVConnector, KVConnectorSpec, KVKey
from lmkit.kinds.loader import Loader, LoaderRequest, LoaderSpec, TensorEntry
from lmkit.kinds.logits_processor import LogitsProcessor, LogitsProcessorSpec, SampleContext
from lmkit.kinds.model import ModelRequest, ModelSpec
from lmkit.kinds.op import ExpertKernel, LinearKernel, OpRequest, OpSpec, PackedWeight
from lmkit.kinds.parsers import ParserRequest, ParserSpec
from lmkit.kinds.platform import Platform, PlatformSpec
from lmkit.kinds.proposer import Proposer, ProposerSpec
from lmkit.kinds.quantization import QuantizationRequest, QuantizationSpec, QuantScheme
from lmkit.kinds.reasoning_parser import ReasoningParserSpec
from lmkit.kinds.renderer import ChatRenderer, RendererSpec
from lmkit.kinds.scheduler import OrderPolicy, RequestView, Scheduler, SchedulerSpec
from lmkit.kinds.structured_output import StructuredOutput, StructuredOutputSpec
from lmkit.kinds.template import TemplateRequest, TemplateSpec
from lmkit.kinds.tokenizer import TokenizerRequest, TokenizerSpec
from lmkit.kinds.tool_parser import ToolParserSpec

__all__ = [name for name in dir() if not name.startswith("_")]
