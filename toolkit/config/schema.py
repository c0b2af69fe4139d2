"""Every setting of a run: its type, its default and one sentence about it. Defaults live here and nowhere else.

Keyword-only, slotted dataclasses: a stray attribute raises instead of being lost. Plain enums instead of `Literal`,
which OmegaConf 2.3 does not know. Enum members are named as users write them. `docs/config.md` is generated from this
file: the string under a field is its documentation, so it says unit, allowed values and what 0 or "" means. The metadata
of a field says what it influences (`Influence`): without any, a run with another value cannot be resumed.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field, fields
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
PositiveNumber = Annotated[int | float, Gt(0)]
"""Whole where it can be: 4.0 is read as 4."""
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
LARGEST_NUMBER = 2**63 - 1
"""What any number may be at most, with or without a minus: what DeepSpeed, PyTorch and readers of JSON take for whole
numbers; sums of others stay finite."""


class Influence(Enum):
    """What changes with a key."""

    result = "what is computed: rejected, unless `checkpoint.allow_changes` names the key"
    free = "where and how work is done, what is written and shown: may change"
    content = "what data is read: may change, as the fingerprint of the tokenized data is compared instead"
    trained = "which parameters are trained: rejected, as a checkpoint holds those and no others"


FREE, BY_CONTENT, TRAINED = ({"influence": one} for one in (Influence.free, Influence.content, Influence.trained))
"""Metadata of fields."""


class Init(str, Enum):
    """Where the weights come from."""

    pretrained = "pretrained"
    random = "random"


class Family(str, Enum):
    """Whose way of writing conversations an official ChatGLM folder has."""

    auto = "auto"
    chatglm = "chatglm"
    chatglm2 = "chatglm2"
    chatglm3 = "chatglm3"
    glm4 = "glm4"


class TuningMethod(str, Enum):
    """Which parameters are trained."""

    full = "full"
    freeze = "freeze"
    lora = "lora"
    qlora = "qlora"
    ptuning_v2 = "ptuning_v2"
    prompt = "prompt"


class LoraInit(str, Enum):
    """Initial values of LoRA."""

    default = "default"
    gaussian = "gaussian"
    pissa = "pissa"
    olora = "olora"


class TaskKind(str, Enum):
    """What a model learns."""

    language = "language"
    distill = "distill"
    reward = "reward"
    classify = "classify"
    embed = "embed"


class RowFormat(str, Enum):
    """How one row of a data file is read."""

    auto = "auto"
    prompt_response = "prompt_response"
    instruction = "instruction"
    sharegpt = "sharegpt"
    messages = "messages"
    text = "text"
    query_response = "query_response"
    conversation = "conversation"
    docstrings = "docstrings"
    preference = "preference"
    labeled = "labeled"
    reward = "reward"
    classify = "classify"
    embed = "embed"


_ASKED = ("prompt", "response", "instruction", "input", "output", "query", "history", "system", "tools")
_LISTED = (
    "conversations",
    "messages",
    "conversation",
    "human",
    "assistant",
    "from",
    "value",
    "role",
    "content",
    "loss",
)
ROW_FIELDS = {
    RowFormat.prompt_response: ("prompt", "response", "history", "system", "tools"),
    RowFormat.instruction: ("instruction", "input", "output", "history", "system", "tools"),
    RowFormat.query_response: ("query", "response", "history", "system", "tools"),
    RowFormat.sharegpt: ("conversations", "system", "tools", "from", "value", "role", "content", "loss"),
    RowFormat.conversation: ("conversation", "system", "tools", "human", "assistant", "loss"),
    RowFormat.messages: ("messages", "system", "tools", "from", "value", "role", "content", "loss"),
    RowFormat.text: ("text",),
    RowFormat.preference: (
        *(*_ASKED, *_LISTED, "chosen", "rejected"),
        *("chosen_messages", "rejected_messages", "rejected_response"),
    ),
    RowFormat.reward: (
        *(*_ASKED, *_LISTED, "chosen", "rejected"),
        *("chosen_messages", "rejected_messages", "rejected_response", "margin"),
    ),
    RowFormat.labeled: (*_ASKED, *_LISTED, "completion", "label", "kto_tag"),
    RowFormat.classify: (*_ASKED, *_LISTED, "text", "label"),
    RowFormat.embed: ("query", "positive", "negatives"),
}
"""What each format reads of a row, and of the messages in it; the names that `columns` may give other ones."""


class TrainOn(str, Enum):
    """Which messages of a conversation the loss covers."""

    auto = "auto"
    all = "all"
    last = "last"
    marked = "marked"


class OnBadRow(str, Enum):
    """What happens at a row that cannot be used."""

    error = "error"
    skip = "skip"


class TooLong(str, Enum):
    """What happens to a conversation longer than `data.max_length`."""

    drop = "drop"
    truncate = "truncate"
    split = "split"  # type: ignore[assignment]  # also the name of a method of str
    error = "error"


class PreferenceLoss(str, Enum):
    """What is learned from pairs of a better and a worse answer."""

    none = "none"
    sigmoid = "sigmoid"
    robust = "robust"
    hinge = "hinge"
    ipo = "ipo"
    simpo = "simpo"
    orpo = "orpo"
    cpo = "cpo"
    kto = "kto"


class Packing(str, Enum):
    """How samples fill the rows of a micro-batch."""

    none = "none"
    packed = "packed"
    grouped = "grouped"


class Attention(str, Enum):
    """How attention is computed."""

    auto = "auto"
    sdpa = "sdpa"
    eager = "eager"
    varlen = "varlen"


class LossKernel(str, Enum):
    """How the losses of tokens are computed."""

    auto = "auto"
    chunked = "chunked"
    liger = "liger"
    full = "full"


class When(str, Enum):
    """Whether something is used."""

    auto = "auto"
    always = "always"
    never = "never"


class OnBadStep(str, Enum):
    """What happens at a step whose numbers go wrong."""

    skip = "skip"
    stop = "stop"
    rewind = "rewind"


class OptimizerName(str, Enum):
    """The optimizer."""

    adamw = "adamw"
    adam = "adam"
    adamw_8bit = "adamw_8bit"
    muon = "muon"
    lion = "lion"
    adafactor = "adafactor"
    sgd = "sgd"
    adagrad = "adagrad"


class DecayOf(str, Enum):
    """Which parameters have weight decay."""

    all = "all"
    matrices = "matrices"
    hidden = "hidden"


class ScheduleName(str, Enum):
    """The shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    polynomial = "polynomial"
    inverse_sqrt = "inverse_sqrt"
    wsd = "wsd"


class Decay(str, Enum):
    """How the learning rate falls at the end of a wsd schedule."""

    linear = "linear"
    cosine = "cosine"
    sqrt = "sqrt"


class WarmupType(str, Enum):
    """The shape of the warm-up."""

    linear = "linear"
    log = "log"


class Dtype(str, Enum):
    """The arithmetic of the model."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class StateDtype(str, Enum):
    """The arithmetic in which the optimizer keeps weights, gradients and its states."""

    fp32 = "fp32"
    bf16 = "bf16"


class Fp8(str, Enum):
    """What shares a scale where linear layers multiply in FP8; names and numbers are torchao's."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"
    rowwise_with_gw_hp = "rowwise_with_gw_hp"


class CommunicationDtype(str, Enum):
    """The arithmetic in which gradients are averaged over ranks."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Device(str, Enum):
    """Where something is offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class Metric(str, Enum):
    """What the model's answers to validation samples are scored by."""

    bleu = "bleu"
    chrf = "chrf"
    rouge_1 = "rouge_1"
    rouge_2 = "rouge_2"
    rouge_l = "rouge_l"
    exact_match = "exact_match"
    distinct_1 = "distinct_1"
    distinct_2 = "distinct_2"
    length = "length"
    chatglm_bleu_4 = "chatglm_bleu_4"
    chatglm_rouge_1 = "chatglm_rouge_1"
    chatglm_rouge_2 = "chatglm_rouge_2"
    chatglm_rouge_l = "chatglm_rouge_l"


class TrackMode(str, Enum):
    """Whether a tracker sends what it gets."""

    auto = "auto"
    online = "online"
    offline = "offline"


AUTO = "auto"
"""In place of a number: one that is found."""
EVAL_LOSS = "eval_loss"
"""Name of the validation loss in metrics.jsonl; other metrics are eval_ and their name. Lower is better."""
EVAL_TAUGHT = ("eval_kl", "eval_general_loss")
"""What is better if it is less in an evaluation of a distilled model; the second without another model as the teacher."""
EVAL_PAIRS = ("eval_rewards/accuracies", "eval_rewards/margins")
"""Names of what is better if it is more in an evaluation of pairs."""
EVAL_LABELS = ("eval_accuracy", "eval_macro_f1")
"""The same in an evaluation of a classifier."""
EVAL_EMBED = ("eval_recall_at_1", "eval_mrr")
"""The same in an evaluation of embeddings."""
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Environment variables that `distributed.interface` sets."""


class Backend(str, Enum):
    """The library that carries the collectives."""

    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"
    mpi = "mpi"
    ccl = "ccl"


class Display(str, Enum):
    """How progress is shown."""

    auto = "auto"
    live = "live"
    plain = "plain"


@dataclass(kw_only=True, slots=True)
class RunFolderConfig:
    """`run`: name and location of the run."""

    name: str = field(default="", metadata=FREE)
    """Name of the run directory below `run.dir`; the same name resumes the same run (see `resume`). "" makes a new directory from recipe and time."""
    dir: str = field(default="runs", metadata=FREE)
    """Directory that holds the run directories; relative to the directory where the command was typed."""
    seed: NonNegativeInt = 42
    """Seed of everything random: weights of a random model, order of the samples, validation split, dropout."""
    max_restarts: NonNegativeInt = field(default=0, metadata=FREE)
    """Maximum number of automatic restarts from the last checkpoint after a crash or hang, by `toolkit launch` or torchrun (whose --max-restarts must be the same); needs `run.name`, and `checkpoint.every` or `checkpoint.minutes`."""
    deadline: str = field(default="", metadata=FREE)
    """When the run, including its export, must have ended: a time of day ("18:00"), a date and time ("2026-11-26 08:00") or a duration from the run's first start ("2h30m"). The schedule is shortened to the steps that fit until then at the measured speed; "": no deadline."""
    display: Display = field(default=Display.auto, metadata=FREE)
    """How rank 0 shows progress: live (one view that is redrawn) or plain (a line per log interval); auto is live on a terminal, and plain in a pipe, under Slurm, PBS or LSF, and in CI."""


@dataclass(kw_only=True, slots=True)
class ShapeConfig:
    """`model.shape`: sizes of a randomly initialised GLM (`model.init=random`)."""

    vocab_size: PositiveInt = 4096
    """Size of the vocabulary in tokens; also the target size of a trained tokenizer."""
    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 384
    """Width inside the feed-forward layer."""
    num_layers: Annotated[int, Ge(1), Le(4096)] = 2
    """Number of decoder layers."""
    num_heads: PositiveInt = 4
    """Number of attention heads."""
    num_kv_heads: PositiveInt = 2
    """Number of key/value heads (multi-query groups)."""
    max_positions: Annotated[int, Ge(8)] = 2048
    """Longest sequence in tokens that the position encoding is made for."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """`model`: the model."""

    name: str = field(default="", metadata=FREE)
    """Name shown in messages; the group's file sets it."""
    path: str = ""
    """Directory with the weights, an official ChatGLM directory or transformers' layout, or owner/name of a model on Hugging Face, which is downloaded into its cache; needed with init=pretrained."""
    revision: str = ""
    """Commit, branch or tag of a model on Hugging Face; "" the newest."""
    tokenizer: str = ""
    """Local directory of the tokenizer; "" takes `model.path`; with init=random and "" a tokenizer is trained on the training data."""
    family: Family = Family.auto
    """Chat format of an official ChatGLM tokenizer; auto finds it in the directory, and asks where ChatGLM2 and ChatGLM3 cannot be told apart."""
    original_labels: bool = True
    """With a ChatGLM's own chat format: train exactly what the original trains; false omits ChatGLM-6B's <sop> and tools' observations."""
    chat_template: str = ""
    """Chat template that replaces the tokenizer's own: a name (alpaca, chatml, chatml_tools, deepseek_r1, deepseek_v3_2, gemma, gemma4, glm4, glm4_5, glm_z1, llama3, mistral, qwen3) or a Jinja file; "" keeps its own."""
    add_tokens: list[str] = field(default_factory=list, metadata=TRAINED)
    """Tokens to add to the vocabulary, such as ["<|im_start|>", "<|im_end|>"] or ["<SEARCH>"]: each becomes one id with rows in embedding and output layer, spare ones first (docs/models.md). Those that the chat template writes become control tokens, all others ordinary text. LoRA trains these rows too."""
    attention: Attention = field(default=Attention.auto, metadata=FREE)
    """auto: varlen for packed sequences, else PyTorch's scaled_dot_product_attention; sdpa: the latter, with a block mask for packed sequences; eager: the step-by-step implementation; varlen: each sample of a packed sequence separately (PyTorch's variable-length kernel on GPUs)."""
    trust_remote_code: bool = False
    """Run the Python files in the model's directory, with all your permissions, if its architecture is not part of transformers; otherwise such models are rejected."""
    router_loss: Annotated[float, Ge(-1)] = -1.0
    """Mixture of experts: what the load-balancing loss of the routers is multiplied by before it is added to the loss; -1 takes `router_aux_loss_coef` of the model's config, 0 leaves it out."""
    router_bias_rate: NonNegativeFloat = 0.0
    """Mixture of experts whose routers balance with a bias (GLM-4.5, DeepSeek-V3): by how much each expert's bias moves after a step, up with fewer tokens than the mean of its layer, down with more; 0 leaves biases as they are. DeepSeek-V3 was trained with 0.001."""
    expert_capacity: NonNegativeFloat = 0.0
    """Mixture of experts, in training: how many times its even share of a micro-batch's tokens on a rank an expert takes at most; of more, those with the smallest weights are dropped, as if they had not chosen it. 0 drops nothing; Switch Transformers were trained with 1.25."""
    init: Init = Init.pretrained
    """pretrained: read the weights in `model.path`; random: a small GLM of `model.shape` with random weights."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes of a random model."""
    hub_id: str = field(default="", metadata=FREE)
    """Name on Hugging Face: `model.path` of the groups that set it, and the base model in the card of an export."""
    modelscope_id: str = field(default="", metadata=FREE)
    """Name on ModelScope, used in the message on how to download the weights."""
    published: dict[str, Any] = field(default_factory=dict, metadata=FREE)
    """Sizes from config.json of `model.hub_id`, set by the group's file: `toolkit plan` needs no download with them."""


@dataclass(kw_only=True, slots=True)
class TuningConfig:
    """`tuning`: the fine-tuning method: which parameters are trained."""

    method: TuningMethod = field(default=TuningMethod.full, metadata=TRAINED)
    """full: all parameters; freeze: some layers only; lora: low-rank adapters on linear layers; qlora: LoRA on a 4-bit base model (GPU); ptuning_v2: a trainable prefix before the keys and values of every layer, as in the ChatGLM repositories; prompt: trainable embeddings before the first token."""
    adapter: str = ""
    """Directory of an adapter to continue training from: peft's (lora, qlora, prompt), or a P-Tuning v2 checkpoint, the original's too. It decides what the other settings of its method are. "" starts from scratch."""
    rank: PositiveInt = field(default=8, metadata=TRAINED)
    """lora, qlora: LoRA rank."""
    alpha: PositiveFloat = 16.0
    """lora, qlora: LoRA is scaled by alpha / rank (rslora: alpha / sqrt(rank))."""
    dropout: Share = 0.0
    """lora, qlora: dropout on LoRA's input; ptuning_v2: on the prefix (the original: 0.1)."""
    rslora: bool = False
    """lora, qlora: rank-stabilised scaling."""
    init: LoraInit = field(default=LoraInit.default, metadata=TRAINED)
    """lora: how LoRA starts. default: the first matrix is random and the second 0; gaussian: likewise, normally distributed; pissa: from the largest singular vectors of each weight (PiSSA), so that the model starts as it is and these are trained; olora: from its QR decomposition (OLoRA). Exported adapters are plain LoRA in any case, of twice the rank with pissa and olora (docs/tuning.md)."""
    init_iterations: NonNegativeInt = 0
    """pissa: iterations of a fast, randomized SVD, such as 16 (peft's pissa_niter_16); 0: the exact SVD."""
    dora: bool = field(default=False, metadata=TRAINED)
    """lora, qlora: train magnitude and direction of the weights separately (DoRA)."""
    target_modules: list[str] = field(default_factory=list, metadata=TRAINED)
    """lora, qlora: which linear layers, and matrices of routed experts (experts.down_proj): names or ends of names (q_proj), patterns (*.mlp.*), or all-linear, without experts; [] takes the family's attention: query, key and value; of a hybrid every linear layer of its attention and linear attention (docs/tuning.md)."""
    save_modules: list[str] = field(default_factory=list, metadata=TRAINED)
    """lora, qlora: modules that are trained in full along with the adapter and saved with them, such as lm_head."""
    num_tokens: PositiveInt = field(default=128, metadata=TRAINED)
    """ptuning_v2, prompt: prefix length in tokens (the original's pre_seq_len)."""
    projection: bool = field(default=False, metadata=TRAINED)
    """ptuning_v2: compute the prefix by a two-layer network from smaller embeddings (the original's prefix_projection)."""
    init_text: str = ""
    """prompt: begin with the embeddings of this text, repeated to the length; "" begins with tokens drawn from the vocabulary."""
    last_layers: NonNegativeInt = field(default=0, metadata=TRAINED)
    """freeze: number of last layers to train."""
    patterns: list[str] = field(default_factory=list, metadata=TRAINED)
    """freeze: train the parameters whose names match one of these patterns too, such as lm_head.* or *.mlp.*."""

    @property
    def max_stage(self) -> int:
        """Highest ZeRO stage that the method is compatible with; config/rules.yaml says why."""
        return 2 if self.method is TuningMethod.qlora or self.dora else 3


@dataclass(kw_only=True, slots=True)
class WeightPoint:
    """One item of `data.sources[i].weights`: the weight of a source at a point of the run."""

    at: float = 0.0
    """Point of the run: 0 its beginning, 1 its end."""
    weight: float = 1.0
    """Weight there; straight lines lead from point to point."""


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """One item of `data.sources` or `data.validation`: files of one kind and how their rows are read."""

    path: str = ""
    """File, directory or pattern (data/*.jsonl.gz): JSONL, a JSON array, CSV or TSV, plain or as .gz or .zst; Parquet or Arrow; a directory of such files, or one that `datasets` has saved; relative to the directory where the command was typed, but the shipped files of examples/data are found from anywhere. With `data.streaming` also a URL, or a .txt list of URLs (docs/data.md#urls). Unused with format=docstrings."""
    hub: str = ""
    """Instead of `path`: name of a dataset on Hugging Face, such as owner/name; downloaded once into its own cache, or with `data.streaming` read from there. `data=owner/name` and `data=owner/name:subset` are short for it."""
    subset: str = ""
    """hub: the configuration of the dataset; "" its only one."""
    revision: str = ""
    """hub: commit or branch of the dataset; "" the newest."""
    split: str = "train"
    """hub, and directories that `datasets` has saved: which split is read."""
    format: RowFormat = RowFormat.auto
    """auto: by the first row's keys; prompt_response: prompt, response, history; instruction: instruction, input, output, history; query_response: ms-swift's query, response, history; sharegpt: conversations with from and value; messages: OpenAI's messages with role and content; conversation: conversation with human and assistant; text: plain text, all of it trained; docstrings: questions and answers made from the docstrings of the running Python's standard library; preference: a prompt with a chosen and a rejected answer; labeled: a conversation whose answer is marked good or bad (docs/preference.md); reward: as preference, and a margin; classify: a text or a conversation with a label; embed: query and positive, two texts that belong together, and negatives (docs/tasks.md); auto means these with `preference.loss` and `task.kind`. Each also takes system and tools."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names in the file where they differ from the format's: {prompt: content, response: summary}; also from, value, role and content inside conversations."""
    max_samples: int = 0
    """Use only the first N rows of this source, in the order of its files; the rest is not tokenized. 0 uses all."""
    general: bool = False
    """With `task=distill` without a teacher: these samples are what must not be forgotten; on them the model keeps the distribution that it has before training (docs/distillation.md)."""
    weight: float = 1.0
    """How often each sample is used per epoch: 2 is twice, 0.5 uses half of them (chosen by `run.seed`); not in `data.validation`."""
    weights: list[WeightPoint] = field(default_factory=list)
    """A weight that changes during the run, in the place of `weight`: [{at: 0, weight: 2}, {at: 1, weight: 0.5}] (docs/data_efficiency.md); [] keeps it."""

    def weight_at(self, at: float) -> float:
        """Return the weight at a point of the run from 0 to 1; outside of its points that of the nearest."""
        points = self.weights
        if not points:
            return self.weight
        next_index = bisect_right(points, at, key=lambda point: point.at)
        if next_index == 0:
            return points[0].weight
        if next_index == len(points):
            return points[-1].weight
        left, right = points[next_index - 1], points[next_index]
        return left.weight + (right.weight - left.weight) * (at - left.at) / (right.at - left.at)

    @property
    def mean_weight(self) -> float:
        """Mean of the weight over the run: it is linear from one of its points to the next."""
        points = sorted({0.0, 1.0, *(point.at for point in self.weights)})
        return sum((end - begin) * (self.weight_at(begin) + self.weight_at(end)) / 2 for begin, end in pairwise(points))


class CurriculumShape(str, Enum):
    """How the longest sample grows in a curriculum."""

    linear = "linear"
    root = "root"
    discrete = "discrete"


@dataclass(kw_only=True, slots=True)
class CurriculumConfig:
    """`data.curriculum`: curriculum: short samples first (docs/data_efficiency.md). Each sample is still used once per epoch."""

    steps: NonNegativeInt = 0
    """Optimizer steps after which samples of all lengths are used; at most those of an epoch. 0: all lengths from the first step."""
    start_length: PositiveInt = 64
    """Longest sample of the first step, in tokens."""
    shape: CurriculumShape = CurriculumShape.linear
    """How the longest sample grows from `start_length` to `data.max_length`: linear; root: with the square root of the steps, fast at first; discrete: in stairs of like width and height."""
    levels: PositiveInt = 4
    """discrete: number of stairs."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """`data`: training and validation data."""

    sources: list[SourceConfig] = field(default_factory=list, metadata=BY_CONTENT)
    """Training data; several sources are mixed according to their weights."""
    validation: list[SourceConfig] = field(default_factory=list, metadata=BY_CONTENT)
    """Validation data: files as in `data.sources`, or what is split off the training rows: a number of rows (500) or a fraction (0.05, 5%), which sets `data.validation_rows` or `data.validation_fraction`. Empty: as these say."""
    validation_fraction: Share = 0.05
    """Fraction of the training rows, chosen by `run.seed`, kept for validation when `data.validation` is empty and `data.validation_rows` is 0; 0 keeps none."""
    validation_rows: NonNegativeInt = 0
    """Number of training rows, chosen by `run.seed`, kept for validation in the place of a fraction; rows that are equal to one of them are kept with it. 0 takes `data.validation_fraction`."""
    train_on: TrainOn = TrainOn.auto
    """auto: what the model family's own fine-tuning trains (ChatGLM-6B and ChatGLM2: the last answer; all others: every answer); all: every answer; last: the last answer; marked: messages with "loss": true. In all of them "loss": true or false at a message decides for it. With ChatGLM-6B and ChatGLM2 each trained answer becomes a sample of its own; with chat templates, those that the template writes otherwise once another turn follows."""
    train_thinking: bool = True
    """With chat templates: whether the reasoning of answers is trained, with its markers (an empty `<think></think>` too); false: only what follows it."""
    max_length: Annotated[int, Ge(8)] = 1024
    """Longest sample in tokens, prompt and answer together, at most the model's positions; also the length of a packed sequence."""
    too_long: TooLong = field(default=TooLong.truncate, metadata=BY_CONTENT)
    """What becomes of samples longer than `max_length`; counted in all cases. truncate (pairs and scores: drop): remove the oldest turns, but not the system message and tools; if the newest turn alone is too long, cut the end of its last answer, whose end token is not trained then; of plain texts keep the beginning. drop: leave out; split: make several samples, of whole turns where they fit, else of windows of tokens that end with an answer where one ends; error: stop."""
    on_bad_row: OnBadRow = OnBadRow.error
    """error: stop at the first row that cannot be used, with file and line; skip: drop, count and list them in a file."""
    max_bad_fraction: Share = 0.01
    """skip: stop all the same when more than this fraction of the rows (and more than 10) cannot be used."""
    max_samples: NonNegativeInt = 0
    """Use only the first N rows of all training sources together; 0 uses all. `max_samples` in a source limits that source alone."""
    packing: Packing = Packing.none
    """none: one sequence per sample, padded to the longest of its micro-batch; packed: sequences of `data.max_length` filled with several samples that do not attend to each other; grouped: micro-batches of samples of similar length, as many as fit into `batch.micro_per_gpu` sequences of `data.max_length`. With packed and grouped `batch.global_size` counts sequences of `data.max_length`."""
    packing_window: NonNegativeInt = 0
    """packed: number of samples that are packed at a time; 0: the whole epoch, with the least padding."""
    share_prefixes: bool = True
    """packed: samples of one conversation share a sequence, and their common prefix is computed once (tree packing, docs/data.md); likewise the two answers of a pair (preference), without packing; losses and gradients are those of separate samples. false: every sample is computed in full."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Short samples first."""
    streaming: bool = False
    """Read, tokenize and pack the files of `data.sources` during training instead of once before it, for data that is too large to prepare: no tokenized cache, `train.epochs` is converted to steps by an estimate, resumes exactly (docs/data.md#streaming). JSONL and Parquet are read from any place on; other files from their beginning."""
    shuffle_buffer: NonNegativeInt = 0
    """streaming: samples that are shuffled at a time in each of the `batch.global_size` parts of the data; 0 keeps the order of the files."""
    num_workers: NonNegativeInt = field(default=0, metadata=FREE)
    """Data-loader processes per rank; 0 loads in the training process."""


@dataclass(kw_only=True, slots=True)
class PrepareConfig:
    """`prepare`: the tokenized cache."""

    dir: str = ".cache/toolkit"
    """Directory for tokenized data and trained tokenizers, shared by all ranks of a node; relative to the working directory of the command."""
    num_workers: NonNegativeInt = 0
    """Number of tokenizer processes; 0: one per core that this process may use."""
    shard: str = ""
    """i/n: process the i-th of n parts only, for several nodes that share `prepare.dir`; run once more without it to merge the parts."""


@dataclass(kw_only=True, slots=True)
class PreferenceConfig:
    """`preference`: preference tuning on pairs of a chosen and a rejected answer, or on answers marked good or bad (docs/preference.md)."""

    loss: PreferenceLoss = PreferenceLoss.none
    """none: supervised fine-tuning; with a reference model sigmoid (DPO), robust (DPO with noisy labels), hinge and ipo; without one simpo, orpo and cpo. The data are preference pairs then, and `batch` counts pairs. kto: single answers, each marked good or bad, with a reference model."""
    beta: PositiveFloat = 0.1
    """Scale of the rewards: the larger, the closer the model stays to the reference; orpo: weight of the odds ratio term (lambda in its paper). preference=simpo sets 2."""
    label_smoothing: Share = 0.0
    """sigmoid, robust, simpo, cpo: expected share of mislabelled pairs, below 0.5; above 0 makes sigmoid conservative DPO (cDPO); preference=robust sets 0.1."""
    gamma: NonNegativeFloat = 0.0
    """simpo: target margin between the rewards of the two answers; preference=simpo sets 1."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the chosen answer's cross entropy (mean over its tokens), which is added to the pair's loss; 0 adds none. orpo and cpo need it: preference=orpo and preference=cpo set 1."""
    desirable_weight: PositiveFloat = 1.0
    """kto: weight of the losses of good answers. Its authors advise that desirable_weight x good answers be 1 to 4/3 times undesirable_weight x bad ones."""
    undesirable_weight: PositiveFloat = 1.0
    """kto: weight of the losses of bad answers."""

    @property
    def is_on(self) -> bool:
        """Whether preferences are learned from."""
        return self.loss is not PreferenceLoss.none

    @property
    def row_format(self) -> RowFormat:
        """Return how rows are read."""
        return RowFormat.labeled if self.loss is PreferenceLoss.kto else RowFormat.preference

    @property
    def is_paired(self) -> bool:
        """Whether answers come in pairs."""
        return self.is_on and self.loss is not PreferenceLoss.kto

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model before training."""
        without = (PreferenceLoss.none, PreferenceLoss.simpo, PreferenceLoss.orpo, PreferenceLoss.cpo)
        return self.loss not in without


class DistillLoss(str, Enum):
    """How far a student is from its teacher."""

    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"


@dataclass(kw_only=True, slots=True)
class RolloutsConfig:
    """`distill.rollouts`: how the student answers for `distill.on_policy`, and which server does so in its place (docs/distillation.md)."""

    max_new_tokens: PositiveInt = 256
    """Longest answer in tokens, its end token included. With its prompt it is cut at data.max_length."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; it changes no loss, as `distill.temperature` does."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the likeliest tokens that have this probability together; 1: from all."""
    batch_size: PositiveInt = 8
    """Prompts that a rank answers at once."""
    url: str = field(default="", metadata=FREE)
    """Base URL of an OpenAI-compatible server that answers in the model's place, such as http://host:8000/v1; its weights are as new as you keep them. ROLLOUTS_API_KEY in the environment is sent as a bearer token. "": the model itself, with the weights of each step."""
    model: str = field(default="", metadata=FREE)
    """Name of the model on the server; "": the only one that it lists."""
    tries: PositiveInt = field(default=3, metadata=FREE)
    """Requests for an answer, before the sample keeps the answer of the data."""
    timeout_s: PositiveFloat = field(default=300.0, metadata=FREE)
    """Seconds that the server has for all answers of a step, tries included."""
    max_failed_steps: NonNegativeInt = field(default=10, metadata=FREE)
    """Steps in a row without any answer of the server, after which the run stops; 0: never."""


@dataclass(kw_only=True, slots=True)
class DistillConfig:
    """`distill`: `task=distill`: learning from a teacher's distributions, and keeping the model's own on general data (docs/distillation.md)."""

    teacher: str = ""
    """The teacher, with the student's tokenizer: a model directory, or owner/name on Hugging Face. "": the model itself as it is before training, whose distribution it keeps on the sources that are marked `general`."""
    teacher_revision: str = ""
    """A teacher on Hugging Face: commit or branch; "" the newest."""
    loss: DistillLoss = DistillLoss.forward_kl
    """forward_kl: KL(teacher || student), covers all that the teacher may say; reverse_kl: KL(student || teacher), keeps to what it most likely says; jsd: the generalised Jensen-Shannon divergence between the two, with `distill.beta`."""
    beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    """jsd: weight of the teacher in the mixture that both are compared with."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of both; above 1 the unlikely tokens count more."""
    weight: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of the divergence in a token's loss; the rest is the cross entropy of its label. 1: the teacher alone."""
    top_k: NonNegativeInt = 0
    """0: the teacher computes with each step; above 0: its log-probabilities of so many tokens are stored once, before the first step, so that it takes no memory while training."""
    dir: str = field(default="", metadata=FREE)
    """Directory of what is stored with `distill.top_k`, where further runs find it; "": `teacher` in the run directory."""
    on_policy: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of a step's samples whose last answer is replaced by one of the student (lambda of GKD); their loss is the divergence alone."""
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    """How the student's answers are written."""
    general_share: Share = 0.0
    """Share of the samples of an epoch that come from sources marked `general`, which are repeated or left out for it; 0: as the weights of the sources say."""


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """`task`: what the model learns."""

    kind: TaskKind = TaskKind.language
    """language: to continue conversations and texts, or with `preference.loss` to prefer answers; distill: to do so as a teacher does (docs/distillation.md); reward: a reward model, which gives the chosen answer of a pair a higher score than the rejected one: the data are pairs then, and `batch` counts pairs; classify: a classifier, which gives texts and conversations one of several labels; embed: embeddings of texts, learned from pairs, which `batch` counts (docs/tasks.md)."""
    center: NonNegativeFloat = 0.0
    """reward: weight of (score of the chosen answer + score of the rejected one)^2, which keeps the scores around 0; 0 leaves them free."""

    @property
    def is_language(self) -> bool:
        """Whether the model learns to write."""
        return self.kind in (TaskKind.language, TaskKind.distill)

    @property
    def has_head(self) -> bool:
        """Whether a head of scores takes the place of the output layer."""
        return self.kind in (TaskKind.reward, TaskKind.classify)


@dataclass(kw_only=True, slots=True)
class ClassifyConfig:
    """`classify`: `task=classify`: a label of each text or conversation (docs/tasks.md)."""

    labels: list[str] = field(default_factory=list)
    """The labels, in the order of the model's scores; a row with another one is an error. []: those that the rows have, sorted."""


class Pooling(str, Enum):
    """What of a text's states becomes its embedding."""

    last = "last"
    mean = "mean"


@dataclass(kw_only=True, slots=True)
class EmbedConfig:
    """`embed`: `task=embed`: embeddings of texts, learned from pairs (docs/tasks.md)."""

    pooling: Pooling = Pooling.last
    """last: the state of the last token; mean: the mean over all tokens."""
    temperature: PositiveFloat = 0.05
    """Divides the cosine similarities that are compared: the smaller, the more the most similar ones count."""
    negatives: NonNegativeInt = 0
    """Texts of each row's `negatives` (hard negatives) that are read, the first ones; they are negatives of all queries of the global batch. 0 reads none."""


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """`batch`: sequences per step. Gradient accumulation steps follow: global_size / (micro_per_gpu x ranks)."""

    global_size: Annotated[int, Ge(1), Le(10**9)] = 32
    """Global batch size: sequences per optimizer step over all ranks; a sequence is a sample, or with `data.packing` packed or grouped up to `data.max_length` tokens of several samples."""
    micro_per_gpu: PositiveInt | str = field(default=1, metadata=FREE)
    """Micro-batch size: sequences per rank and forward pass; auto: the largest that fits into the memory of every rank, measured before the first step and written into config.yaml of the run (docs/planning.md)."""
    world_sizes: list[int] = field(default_factory=list, metadata=FREE)
    """Numbers of ranks that the run is to start or resume with: `batch.global_size` is checked for each of them, before anything starts; [] checks the present one only."""


LEARNING_RATES = {
    TuningMethod.full: 2e-5,
    TuningMethod.freeze: 2e-5,
    TuningMethod.lora: 2e-4,
    TuningMethod.qlora: 2e-4,
    TuningMethod.ptuning_v2: 5e-3,  # the original's 2e-2 diverges in float16
    TuningMethod.prompt: 3e-2,  # as in peft's own examples
}
"""Peak rates with AdamW. Few new parameters that begin at 0 or at random need larger ones than trained weights."""
PREFERENCE_RATE = 40
"""By what these are divided for pairs: to 5e-7 and 5e-6, as in alignment-handbook's recipes/zephyr-7b-beta/dpo."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """`optim`: the optimizer."""

    name: OptimizerName = OptimizerName.adamw
    """adamw: decoupled weight decay; adam: weight decay added to the gradient; adamw_8bit: AdamW whose states take 8 bits (bitsandbytes); muon: orthogonalised momentum for the matrices of the layers, AdamW for the rest; lion: the sign of a momentum; adafactor: factored second moments; sgd, adagrad: PyTorch's."""
    lr: PositiveFloat = 2e-5
    """Peak learning rate. The default depends on `tuning.method`: full and freeze 2e-5, lora and qlora 2e-4, ptuning_v2 5e-3, prompt 3e-2; with `preference.loss` a fortieth of that: 5e-7, 5e-6."""
    adam_lr: NonNegativeFloat = 0.0
    """muon: peak learning rate of what AdamW trains (embeddings, output layer, norms, biases); 0 takes `optim.lr`."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """adamw, adam, adamw_8bit, muon, lion: the two decay rates of the moving averages."""
    momentum: Share = 0.0
    """muon, sgd: share of the last step's momentum that stays; the groups set 0.95 and 0.9."""
    eps: NonNegativeFloat = 1e-8
    """adamw, adam, adamw_8bit, muon, adagrad: term added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the parameters that `optim.decay` names."""
    decay: DecayOf = DecayOf.all
    """Which trained parameters have weight decay. all: every one; matrices: no biases and norms; hidden: no embeddings and output layer either."""
    lora_plus_ratio: PositiveFloat = 1.0
    """lora, qlora: learning rate of LoRA's second matrices (B) as a multiple of `optim.lr`, as in LoRA+, whose authors advise 16 with a lower `optim.lr`; 1: the same rate for both."""
    layer_lr_decay: Annotated[float, Gt(0), Le(1)] = 1.0
    """Layer-wise learning rate decay d: layer i of L (from 0) uses lr x d^(L-i), embeddings lr x d^(L+1), the output layer the full rate; 1: no decay."""
    torch: bool | str = field(default=AUTO, metadata=FREE)
    """true: PyTorch's own fused Adam, and a Lion of PyTorch's operations; false: DeepSpeed's (FusedAdam and FusedLion, or DeepSpeedCPUAdam and DeepSpeedCPULion when offloaded), which are compiled once at first use. auto: PyTorch's Adam, and a Lion of PyTorch's operations without a GPU or a compiler (nvcc); DeepSpeed's when offloaded. The other optimizers are not DeepSpeed's."""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """`schedule`: the learning rate over the steps. constant, linear and cosine equal DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR with the lowest rate 0; polynomial, inverse_sqrt and wsd those of transformers."""

    name: ScheduleName = ScheduleName.cosine
    """constant: stays at the peak; linear: falls in a straight line to 0; cosine: falls to `schedule.min_lr_ratio` of the peak; polynomial: falls there as a power of the steps that are left; inverse_sqrt: falls as 1 / sqrt(step); wsd: stays at the peak and falls at the end (warm-up, stable, decay)."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of warm-up; 0 starts at the peak."""
    warmup_ratio: Share = 0.0
    """Warm-up as a fraction of all steps, rounded up; of this and `schedule.warmup_steps`, the later setting counts."""
    warmup_type: WarmupType = WarmupType.linear
    """linear or log: how the learning rate rises during warm-up; of polynomial, inverse_sqrt and wsd linearly."""
    min_lr_ratio: Share = 0.0
    """cosine, polynomial, wsd: last learning rate as a fraction of the peak."""
    power: NonNegativeFloat = 1.0
    """polynomial: the power; 1 falls in a straight line, 2 fast at first and slowly at the end."""
    timescale: NonNegativeInt = 0
    """inverse_sqrt: steps after which the rate is 1 / sqrt(2) of the peak, counted from the end of the warm-up; 0 takes the steps of the warm-up, or 10000 without one."""
    decay_steps: NonNegativeInt = 0
    """wsd: optimizer steps of the fall at the end; 0 takes `schedule.decay_ratio`."""
    decay_ratio: Share = 0.1
    """wsd: the fall at the end as a fraction of all steps, rounded up."""
    decay_type: Decay = Decay.linear
    """wsd: how it falls: linear, cosine, or sqrt (as 1 - sqrt, fast at first)."""
    warmup_min_ratio: float = -1.0
    """First learning rate of the warm-up as a fraction of the peak; -1 takes 1 / steps of the warm-up, so that the first update changes the weights, which 0 would not."""


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    """`precision`: precision of the model. The loss is always summed in fp32."""

    dtype: Dtype = Dtype.bf16
    """fp32, bf16 or fp16. With bf16 and fp16 the optimizer keeps fp32 master weights."""
    optimizer_states: StateDtype = StateDtype.fp32
    """bf16: master weights, gradients and Adam's moments in bf16 instead of fp32, half their memory; computed in fp32 and rounded stochastically, so that small updates are not lost, but each adds noise (docs/optimizers.md)."""
    fp8: Fp8 = Fp8.none
    """bf16: the decoder's linear layers multiply in FP8 in training, on GPUs that have it; weights, optimizer, evaluation and what is saved stay as they are. What shares a scale: tensorwise a matrix (fastest), rowwise a row or column, rowwise_with_gw_hp likewise with weight gradients in bf16 (most accurate); none: products in bf16."""
    tf32: bool = False
    """fp32 on GPUs: multiply matrices in TF32, several times as fast with 10 instead of 23 bits of mantissa; off, fp32 is fp32, convolutions included."""
    loss_scale: NonNegativeFloat = 0.0
    """fp16: fixed loss scale; 0 scales dynamically."""
    initial_scale_power: NonNegativeInt = 16
    """fp16: the dynamic loss scale starts at 2 to this power."""
    loss_scale_window: PositiveInt = 1000
    """fp16: steps without overflow after which the dynamic scale doubles."""
    hysteresis: PositiveInt = 2
    """fp16: overflows that are tolerated before the scale is halved."""
    consecutive_hysteresis: bool = False
    """fp16: refill the hysteresis after each step without overflow."""
    min_loss_scale: PositiveInt = 1
    """fp16: smallest dynamic loss scale."""
    communication_dtype: CommunicationDtype = CommunicationDtype.auto
    """The type in which gradients are sent and averaged; auto: that of the model. With bf16 each addition keeps 8 bits, so their rounding grows with the number of ranks: fp32 is worth twice the bytes with many ranks, or to compare runs on different numbers of them."""
    auto_cast: bool = False
    """fp16: cast floating-point inputs of the model to fp16; token ids are never cast."""


@dataclass(kw_only=True, slots=True)
class OffloadOptimizerConfig:
    """`zero.offload_optimizer`: optimizer states (and their step) outside the GPU; stages 1, 2 and 3."""

    device: Device = Device.none
    """none, cpu, or nvme (stage 3 only)."""
    nvme_path: str = ""
    """Directory on the NVMe disk, made by you; needed with device=nvme."""
    pin_memory: bool = True
    """Page-locked host memory: faster, not swappable."""
    buffer_count: Annotated[int, Ge(4)] = 4
    """nvme: number of buffers; at least the number of states per parameter (4 for Adam)."""
    fast_init: bool = False
    """nvme: faster start. DeepSpeed 0.19.8 does not read it."""
    pipeline_read: bool = False
    """nvme: read the next tile while this one is computed."""
    pipeline_write: bool = False
    """nvme: write the last tile while this one is computed."""
    ratio: Annotated[float, Ge(0), Le(1)] = 1.0
    """cpu, stage 3: fraction of the parameters whose optimizer step runs on the CPU."""
    super_offload: bool = False
    """cpu, stage 3, NVIDIA GPUs: DeepSpeed's SuperOffload for Grace Hopper and similar chips: the optimizer step in a separate process, in parallel with the backward pass if `train.gradient_clipping` is 0 (docs/zero.md)."""
    cpuadam_cores_perc: Annotated[float, Gt(0), Lt(1)] = 0.8
    """super_offload: fraction of a rank's cores that its optimizer process gets."""


@dataclass(kw_only=True, slots=True)
class OffloadParamConfig:
    """`zero.offload_param`: parameters outside the GPU; stage 3 only."""

    device: Device = Device.none
    """none, cpu or nvme."""
    nvme_path: str = ""
    """Directory on the NVMe disk, made by you; needed with device=nvme."""
    pin_memory: bool = True
    """Page-locked host memory: faster, not swappable."""
    buffer_count: PositiveInt = 5
    """nvme: number of buffers."""
    buffer_size: PositiveInt = 100000000
    """nvme: elements per buffer; the largest parameter must fit."""
    max_in_cpu: NonNegativeInt = 1000000000
    """nvme: elements that may stay in host memory."""


@dataclass(kw_only=True, slots=True)
class AioConfig:
    """`zero.aio`: asynchronous input/output of NVMe offload."""

    block_size: PositiveInt = 1048576
    """Bytes per request."""
    queue_depth: PositiveInt = 8
    """Requests under way at once per thread."""
    intra_op_parallelism: PositiveInt = 1
    """Threads per read or write."""
    single_submit: bool = False
    """Hand requests over one by one instead of in a batch."""
    overlap_events: bool = True
    """Hand over new requests while waiting for earlier ones."""
    use_gds: bool = False
    """NVIDIA GPUDirect Storage."""


@dataclass(kw_only=True, slots=True)
class ZenFlowConfig:
    """`zero.zenflow`: DeepSpeed's ZenFlow: the columns with the largest gradients are updated in every step, on the GPU; all others together every few steps, on the CPU. Another algorithm than AdamW (docs/zero.md)."""

    enabled: bool = False
    """Use it; stages 1 and 2 with an optimizer offloaded to the CPU."""
    topk_ratio: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of the columns of each matrix that are updated in every step."""
    select_interval: PositiveInt = 16
    """Steps after which these columns are chosen again; a multiple of update_interval."""
    update_interval: PositiveInt = 4
    """Steps whose gradients are added up for all other columns before they are updated."""
    full_warm_up_rounds: NonNegativeInt = 0
    """Number of first steps that update all parameters."""
    overlap_step: bool = False
    """Run the update on the CPU in parallel with the next steps, in a separate process; such a run cannot be resumed."""
    offload: bool = False
    """Keep the optimizer states of the chosen columns in host memory; needs zero.overlap_comm."""
    pt_reserved_cores_perc: Annotated[float, Ge(0), Le(1)] = 0.5
    """overlap_step: fraction of the cores that are kept from the optimizer process."""


@dataclass(kw_only=True, slots=True)
class ZeroConfig:
    """`zero`: DeepSpeed's ZeRO, what is split over the ranks. Sizes are in elements, not bytes."""

    stage: int = 2
    """0: nothing; 1: optimizer states; 2: and gradients; 3: and parameters."""
    contiguous_gradients: bool = True
    """Stages 2, 3: copy gradients into one buffer as they appear, against fragmentation."""
    overlap_comm: bool = False
    """Overlap gradient reduction with the backward pass: faster on GPUs; stages 1 and 2 need a second buffer of reduce_bucket_size elements; docs/speed.md says why it is off."""
    reduce_scatter: bool = True
    """Stages 1, 2: average each rank's part apart; DeepSpeed 0.19.8 still sends whole buckets, by all-reduce."""
    reduce_bucket_size: PositiveInt = 500000000
    """Elements that are reduced at once."""
    allgather_partitions: bool = True
    """Stages 1, 2: collect updated parameters with all-gather. DeepSpeed 0.19.8 always does, and does not read it."""
    allgather_bucket_size: PositiveInt = 500000000
    """Stages 1, 2: elements that are gathered at once."""
    round_robin_gradients: bool = False
    """Stages 1, 2 with CPU offload: spread the copying of gradients evenly over the ranks."""
    sub_group_size: NonNegativeInt = 1000000000
    """Stage 3: elements of one optimizer tile; 0: each parameter is one."""
    stage3_prefetch_bucket_size: NonNegativeInt = 50000000
    """Stage 3: elements fetched ahead of their use."""
    stage3_param_persistence_threshold: NonNegativeInt = 100000
    """Stage 3: parameters smaller than this stay whole on every rank."""
    stage3_max_live_parameters: NonNegativeInt = 1000000000
    """Stage 3: elements that may be gathered at once on one rank."""
    stage3_max_reuse_distance: NonNegativeInt = 1000000000
    """Stage 3: keep a gathered parameter if it is used again within so many elements."""
    stage3_gather_16bit_weights_on_model_save: bool = False
    """Stage 3: for other programs that call DeepSpeed's save_16bit_model; our own export gathers in any case."""
    zero_hpz_partition_size: PositiveInt = 1
    """Stage 3, ZeRO++: number of ranks (the GPUs of one node) that share a second copy of the weights, from which the backward pass gathers; 1: no copy."""
    zero_quantized_weights: bool = False
    """Stage 3, ZeRO++: gather weights in 8 bits (NVIDIA GPUs)."""
    zero_quantized_gradients: bool = False
    """Stage 3, ZeRO++: average gradients in 4 bits if there are several nodes (NVIDIA GPUs, fp16)."""
    offload_optimizer: OffloadOptimizerConfig = field(default_factory=OffloadOptimizerConfig)
    """Optimizer states outside the GPU."""
    offload_param: OffloadParamConfig = field(default_factory=OffloadParamConfig)
    """Parameters outside the GPU."""
    zenflow: ZenFlowConfig = field(default_factory=ZenFlowConfig)
    """Updates of the important columns first."""
    aio: AioConfig = field(default_factory=AioConfig)
    """Disk access of NVMe offload."""


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """`parallel`: how many ranks share one model. Data-parallel ranks = ranks / (tensor x sequence x pipeline)."""

    tensor: PositiveInt = field(default=1, metadata=FREE)
    """Tensor parallelism: adjacent ranks over which the matrices of each layer are split (DeepSpeed's AutoTP), best on one node."""
    sequence: PositiveInt = field(default=1, metadata=FREE)
    """Sequence parallelism: ranks over which the tokens of each sequence are split (DeepSpeed's Ulysses), for sequences that are too long for one."""
    pipeline: PositiveInt = field(default=1, metadata=FREE)
    """Pipeline parallelism: ranks over which the layers are split, each a stage (DeepSpeed's PipelineModule)."""
    expert: PositiveInt = field(default=1, metadata=FREE)
    """Expert parallelism, for mixtures of experts: adjacent ranks over which the routed experts of each layer are divided; each sends its tokens to the ranks that have their experts. These ranks train on different rows, so it is not part of the product above."""


@dataclass(kw_only=True, slots=True)
class KernelsConfig:
    """`kernels`: kernels of the loss and the layers; attention is set by `model.attention`."""

    loss: LossKernel = LossKernel.auto
    """chunked: from the hidden states of trained tokens alone, a few at a time, so that the logits are never in memory all at once; liger: the same by liger-kernel (GPU), which waits for the GPU once per micro-batch; full: all logits; auto: chunked. Models that change their logits afterwards (Gemma 2), and output layers with LoRA, get the logits of all trained tokens at once."""
    liger: When = When.auto
    """liger-kernel's norms, feed-forward layers and rotary positions in place of the model's own (GPU): auto where the package is installed and knows the model; always: else reject; never."""
    mlp_pieces: PositiveInt = 1
    """Pieces into which feed-forward layers split the tokens of a micro-batch, for long sequences: inner activations are in memory for one piece at a time, and are computed twice; 1: no split. Expert layers are never split."""


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """`compile`: compile the model's operations with torch.compile; the first steps take minutes."""

    enabled: bool = False
    """Compile the model."""
    backend: str = "inductor"
    """Of torch.compile: inductor, eager (for tests), or another one that is installed."""
    mode: str = ""
    """Of torch.compile: reduce-overhead, max-autotune, max-autotune-no-cudagraphs; "" its default."""
    dynamic: When = When.auto
    """Whether one compiled model serves sequences of all lengths: auto compiles for the first length, and a general version when a second one comes; never compiles for each length."""
    deepcompile: bool = False
    """DeepSpeed's DeepCompile on top, which moves the communication of ZeRO into the compiled graph (GPUs, zero.stage 1 to 3)."""


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointingConfig:
    """`train.activation_checkpointing`: recompute activations in the backward pass instead of keeping them."""

    enabled: bool = False
    """Recompute each decoder layer; keeps one hidden state per layer."""
    partition_activations: bool = False
    """Split the kept hidden states over model-parallel ranks; without model parallelism it has no effect."""
    cpu_checkpointing: bool = False
    """Keep the hidden states in host memory; no effect on CPU ranks."""
    contiguous_memory_optimization: bool = False
    """Copy the kept hidden states into one buffer; needs partition_activations and number_checkpoints."""
    number_checkpoints: NonNegativeInt = 0
    """Number of kept hidden states (the number of layers); 0 leaves it out; needed with contiguous_memory_optimization."""
    synchronize_checkpoint_boundary: bool = False
    """Synchronise the device at each layer's beginning and end."""
    profile: bool = False
    """Log forward and backward time of each checkpointed layer."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """`train`: length of the run, and what is done in each step."""

    epochs: PositiveNumber = 1
    """Passes over the training data; 2.5 ends in the middle of the third, after epochs x steps of one pass, rounded up. Unused when `train.max_steps` is given."""
    max_steps: NonNegativeInt = 0
    """Optimizer steps; 0 trains `train.epochs` epochs."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    rehearse: bool = field(default=True, metadata=FREE)
    """Dry run: before the first step try once what comes later, and restore everything afterwards: the longest batch forward and backward, the memory of an update, writing into checkpoints/ and next to export/, an evaluation batch (docs/planning.md)."""
    log_every: PositiveInt = field(default=10, metadata=FREE)
    """Steps between two log lines; each step is in metrics.jsonl that is a multiple of it, and the first and last."""
    on_bad_step: OnBadStep = field(default=OnBadStep.skip, metadata=FREE)
    """What happens at a step whose loss or gradient is NaN or Inf, or a spike; its samples are named and saved, its update is skipped on all ranks. skip: continue; stop: end the run (exit code 70); rewind: go back to the last checkpoint, and on from there with the data after this step."""
    max_loss_ratio: NonNegativeFloat = field(default=0.0, metadata=FREE)
    """A loss above this multiple of the median of the last 100 good steps is a spike; 0: off."""
    max_grad_norm_ratio: NonNegativeFloat = field(default=0.0, metadata=FREE)
    """A gradient norm above this multiple of the median of the last 100 good steps is a spike; 0: off."""
    max_skipped_steps: PositiveInt = field(default=20, metadata=FREE)
    """Stop (exit code 70) after this many consecutive skipped steps."""
    activation_checkpointing: ActivationCheckpointingConfig = field(
        default_factory=ActivationCheckpointingConfig, metadata=FREE
    )
    """Trade computation for memory."""
    neftune_alpha: NonNegativeFloat = 0.0
    """NEFTune: uniform noise of up to neftune_alpha / sqrt(tokens of a sequence x hidden size) is added to the embeddings of training sequences; 5 to 15 are usual, 0 adds none."""

    def over_epochs(self, count: int) -> int:
        """Return `epochs` x `count`, rounded up; exact where a product of floats is not (1.1 x 10 = 11)."""
        return math.ceil(Fraction(str(self.epochs)) * count)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """`checkpoint`: checkpoints and exports on disk."""

    every: NonNegativeInt = 0
    """Steps between two checkpoints; 0 counts no steps (see `checkpoint.minutes`)."""
    minutes: NonNegativeFloat = 15.0
    """Minutes between two checkpoints, as rank 0 counts them; whichever of both is due first saves. 0: by `checkpoint.every` alone."""
    keep: NonNegativeInt = 2
    """Newest checkpoints kept; 0 keeps all. An older one is deleted only after a newer one is complete and a good step, or an evaluation, has followed it."""
    keep_weights: Annotated[int, Ge(-1)] = 0
    """Checkpoints beyond checkpoint.keep that stay as weights only (step-N-weights, a model directory, nothing to resume from); 0 makes none, -1 keeps all."""
    max_gib: NonNegativeFloat = 0.0
    """GiB that the checkpoints of a run, weights only included, may take together; the oldest go first, the newest never. 0 is no limit."""
    at_end: bool = True
    """Save a checkpoint after the last step."""
    asynchronous: bool = False
    """Copy what is saved to host memory and write it during the next steps: a short pause for as much host memory per rank as its part of a checkpoint."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys or sections that may differ from those of the checkpoint although they change what is computed, such as [optim.lr, train.epochs]; data allows other data."""
    export: bool = True
    """Write what was trained to export/ at the end: the model in transformers' layout (safetensors), or the adapter."""
    verify_export: bool = True
    """Read export/ again and compare it with the run: a model's logits on the first rank's CPU, in the memory of one layer; an adapter bit for bit, with the base that is loaded."""


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """`export`: requirements on export/; `checkpoint.export` decides whether there is one."""

    require_serving: bool = False
    """Publish export/ only if transformers alone serves it as it was trained (`toolkit verify-serving`): one that fails is kept as export.held, with the reasons, and the run ends with exit code 74. The model is loaded once more, on the first rank's CPU."""


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """`evaluate`: loss and perplexity on the validation split, exact over all tokens of the samples taken, and the model's answers to it."""

    every: NonNegativeInt = 0
    """Steps between two evaluations; 0 evaluates at the end only."""
    at_start: bool = True
    """Evaluate, and ask `evaluate.prompts`, before the first step too."""
    metrics: list[Metric] = field(default_factory=list)
    """At each evaluation the model also answers validation samples, and the answers are scored by these (docs/evaluation.md); [] leaves it out. Those that begin with chatglm_ are what the ChatGLM repositories computed, and need the packages jieba, rouge-chinese and nltk."""
    max_samples: NonNegativeInt = 1000
    """Number of validation samples for the loss, drawn once and the same in every evaluation, from each source in proportion; 0: all."""
    max_answers: NonNegativeInt = 200
    """Number of validation samples to answer, evenly spread over the split, at most `evaluate.max_samples`; 0: as many as that."""
    batch_size: PositiveInt = 8
    """Samples that a rank answers at once."""
    max_new_tokens: PositiveInt = 64
    """Longest answer in tokens, to a validation sample or to a question of `evaluate.prompts`."""
    temperature: NonNegativeFloat = 0.0
    """0: always the likeliest token; otherwise the logits are divided by it and tokens are sampled."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this; 1: from all."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    seed: NonNegativeInt = 0
    """Seed of sampling: the same seed gives the same answers, on any number of ranks."""
    keep_best: str = ""
    """Keep the checkpoint that is the best by this name in metrics.jsonl as well: eval_loss, eval_ and one of `evaluate.metrics`, such as eval_rouge_l, or a figure of the task, such as eval_kl of task=distill; "" keeps the newest only. Rated are checkpoints of steps that were evaluated."""
    ngram_baselines: bool = False
    """Print the loss of unigram and bigram baselines counted on the training split, for comparison."""
    prompts: list[str] = field(default_factory=list)
    """Questions that the model answers at the end, and a pretrained one before the first step too (greedy); shown and written to samples.jsonl."""


@dataclass(kw_only=True, slots=True)
class TensorboardConfig:
    """`track.tensorboard`: event files for TensorBoard."""

    enabled: bool = False
    """Write events; needs the package tensorboard."""
    dir: str = ""
    """Directory in which each run has a directory NAME-ID for its events; "" is tensorboard/ in the run directory."""


@dataclass(kw_only=True, slots=True)
class CsvConfig:
    """`track.csv`: a table for spreadsheets."""

    enabled: bool = False
    """Write metrics.csv into the run directory: what is in metrics.jsonl, one column per metric."""


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """`track.wandb`: Weights & Biases. Its key comes from the environment (WANDB_API_KEY) or from `wandb login`, never from here."""

    enabled: bool = False
    """Send metrics; needs the package wandb."""
    project: str = "exacttune"
    """Project."""
    entity: str = ""
    """User or team that owns the project; "" your default one."""
    group: str = ""
    """Group of runs; "" none."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    mode: TrackMode = TrackMode.auto
    """auto: what WANDB_MODE says, else online; offline: files in wandb/ of the run directory, sent later by `wandb sync`."""


@dataclass(kw_only=True, slots=True)
class MlflowConfig:
    """`track.mlflow`: MLflow. User and password of a server come from the environment (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN), never from here."""

    enabled: bool = False
    """Send metrics; needs the package mlflow-skinny, or mlflow."""
    uri: str = ""
    """Server (http://HOST:PORT), database (sqlite:///FILE, needs mlflow) or directory; "" is what MLFLOW_TRACKING_URI says, else the directory mlruns/ below `run.dir`."""
    experiment: str = "exacttune"
    """Experiment that the run belongs to; made where it is not there."""


@dataclass(kw_only=True, slots=True)
class SwanlabConfig:
    """`track.swanlab`: SwanLab. Its key comes from the environment (SWANLAB_API_KEY) or from `swanlab login`, never from here."""

    enabled: bool = False
    """Send metrics; needs the package swanlab."""
    project: str = "exacttune"
    """Project."""
    workspace: str = ""
    """User or organisation that owns the project; "" your own."""
    mode: TrackMode = TrackMode.auto
    """auto: what SWANLAB_MODE says, else online; offline: files in swanlab/ of the run directory, sent later by `swanlab sync`."""


@dataclass(kw_only=True, slots=True)
class TrackioConfig:
    """`track.trackio`: Trackio. A token comes from the environment (HF_TOKEN), never from here."""

    enabled: bool = False
    """Write metrics; needs the package trackio."""
    project: str = "exacttune"
    """Project."""
    space: str = ""
    """Hugging Face Space (OWNER/NAME) that shows them; "" is Trackio's own directory on this machine (TRACKIO_DIR)."""


@dataclass(kw_only=True, slots=True)
class TrackConfig:
    """`track`: experiment tracking: which tools receive the metrics; metrics.jsonl is always written (docs/tracking.md)."""

    patience_s: NonNegativeFloat = 30.0
    """Seconds that the beginning of a run and its end each wait at most for trackers that do not answer; never more than a quarter of distributed.timeout_s."""
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig, metadata={"package": "tensorboard"})
    """TensorBoard."""
    csv: CsvConfig = field(default_factory=CsvConfig)
    """A CSV file."""
    wandb: WandbConfig = field(default_factory=WandbConfig, metadata={"package": "wandb"})
    """Weights & Biases."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig, metadata={"package": "mlflow-skinny"})
    """MLflow."""
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig, metadata={"package": "swanlab"})
    """SwanLab."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig, metadata={"package": "trackio"})
    """Trackio."""

    @property
    def enabled(self) -> list[str]:
        """Names of the trackers that are switched on."""
        return [name for name in TRACKERS if getattr(self, name).enabled]


TRACKERS = tuple(section.name for section in fields(TrackConfig) if section.name != "patience_s")
"""The sections of `track` that can be switched on; metrics.jsonl is always written."""
TRACKER_PACKAGES = {
    section.name: section.metadata["package"] for section in fields(TrackConfig) if "package" in section.metadata
}
"""Tracker, which is also the name of its module -> what pip installs. A CSV file needs none."""


@dataclass(kw_only=True, slots=True)
class ReportConfig:
    """`report`: the report RUN/report.html; `toolkit report RUN` writes it at any time."""

    enabled: bool = True
    """Write the report when the run ends."""
    every: NonNegativeInt = 0
    """Update the report every N optimizer steps during the run; 0: only at the end."""


@dataclass(kw_only=True, slots=True)
class FlopsProfilerConfig:
    """`profile.flops`: DeepSpeed's flops profiler."""

    enabled: bool = False
    """Profile the forward passes of one step of rank 0."""
    profile_step: PositiveInt = 1
    """Optimizer steps before the one that is profiled; fewer than the run has."""
    module_depth: Annotated[int, Ge(-1)] = -1
    """Depth of modules in the table; -1 the innermost."""
    top_modules: PositiveInt = 1
    """Modules shown per depth."""
    detailed: bool = True
    """Print the whole model's table."""
    output_file: str = ""
    """File for the table; "" is flops.txt in the run directory."""


@dataclass(kw_only=True, slots=True)
class CommsLoggerConfig:
    """`profile.comms`: DeepSpeed's log of collectives."""

    enabled: bool = False
    """Log collectives."""
    verbose: bool = False
    """Print each call."""
    prof_all: bool = True
    """Log every operation; false: only `prof_ops`."""
    prof_ops: list[str] = field(default_factory=list)
    """Operations that are logged when prof_all is false, for example all_reduce."""
    debug: bool = False
    """Name the calling function next to each operation."""


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """`plan`: memory limits, and choosing a layout automatically."""

    auto: bool = False
    """Choose ZeRO stage, offloading to host memory, activation checkpointing and micro-batch at launch: the fastest, by the plan, that fits on these nodes with the same global batch. A run that resumes on as many ranks keeps what was chosen."""

    max_gpu_gib: NonNegativeFloat = 0.0
    """GiB of GPU memory that a rank may use; 0 is what the GPU has. On CPU ranks it bounds the bytes of their tensors during the dry run; 0 does not."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """`profile`: DeepSpeed's profilers; they slow down training."""

    wall_clock_breakdown: bool = False
    """Time forward, backward and step; synchronises the device."""
    memory_breakdown: bool = False
    """Log memory at several points of a step."""
    dump_state: bool = False
    """Print DeepSpeed's state at start."""
    flops: FlopsProfilerConfig = field(default_factory=FlopsProfilerConfig)
    """Flops profiler."""
    comms: CommsLoggerConfig = field(default_factory=CommsLoggerConfig)
    """Communication logging."""


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """`launch`: the expected number of nodes, and environment variables of the ranks."""

    num_nodes: NonNegativeInt = 0
    """Nodes that must take part; a run on fewer or more is rejected; 0 takes what the launcher gives."""
    min_nodes: NonNegativeInt = 0
    """Fewest nodes of the hostfile to train on, by `toolkit launch`. When a node is lost, the run resumes from its last checkpoint on the others, with the same global batch; when one answers again or is added to the hostfile, it saves, stops and resumes on more nodes; needs `run.max_restarts`. 0: all nodes take part."""
    max_nodes: NonNegativeInt = 0
    """With `launch.min_nodes`: most nodes to train on; further ones of the hostfile are spares. 0 takes all."""
    env: dict[str, Any] = field(default_factory=dict)
    """Environment variables of every rank on every node: {NCCL_DEBUG: INFO, HF_TOKEN: }. A value is set as it is typed and wins over the environment; a name without one (null) has to be set where the command is typed: for secrets, which are forwarded and never written to a file. In recipes and configs \\${ stands for ${."""

    @property
    def values(self) -> dict[str, str]:
        """Name -> value of the variables that the recipe sets."""
        return {name: as_text(value) for name, value in self.env.items() if value is not None}

    @property
    def forwarded(self) -> list[str]:
        """Variables whose values come from the environment where the command is typed."""
        return [name for name, value in self.env.items() if value is None]


def as_text(value: Any) -> str:
    """Return a value of `launch.env` as the environment has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.name if isinstance(value, Enum) else value)


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    """`distributed`: communication between ranks."""

    backend: Backend = Backend.auto
    """auto: nccl on NVIDIA and AMD GPUs, hccl on Ascend NPUs, gloo on CPUs."""
    interface: str = ""
    """Network interface of the collectives, for example eth0 (sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME); "" lets the library choose."""
    timeout_s: PositiveInt = 1800
    """Seconds after which a collective that does not finish ends the run; also the limit for evaluations, checkpoints and the first steps, and half of it for waiting for data."""
    hang_after_s: Annotated[float, Ge(-1)] = 0.0
    """Seconds after which a step (or evaluation, or save) counts as hanging, waiting for data not included: all ranks write their stacks to logs/ and the run ends with code 124. 0 takes five times the slowest of the last 100 steps, at least 60, and distributed.timeout_s for the first three steps, the first after an evaluation or save, and all steps with compile.enabled; -1 never."""
    cpu_shared_memory: bool = False
    """CPU ranks: compile and use DeepSpeed's shared-memory all-reduce (1-3 minutes once, 66 MiB of /dev/shm per rank)."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A whole run. Everything below `toolkit/config/` hands this over; no other part sees Hydra or YAML."""

    recipe: str = field(default="", metadata=FREE)
    """Name of the recipe, set by the loader."""
    language: str = field(default="", metadata=FREE)
    """Language of messages: en or zh; "" takes the locale's."""
    resume: str = field(default="auto", metadata=FREE)
    """auto: a named run resumes from its newest complete checkpoint, a new name starts a new run; must: a checkpoint is required; never: the run must be new; or the path of a checkpoint or run directory to resume from, in a new run directory."""
    deepspeed_json: str = field(default="", metadata=FREE)
    """A DeepSpeed JSON of your own that replaces the recipe's DeepSpeed settings; "auto" in it takes the recipe's value."""
    run: RunFolderConfig = field(default_factory=RunFolderConfig)
    """Name, place and seed."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    tuning: TuningConfig = field(default_factory=TuningConfig)
    """The fine-tuning method: which parameters are trained."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training and validation data."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Preference tuning."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """What the model learns."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Distillation."""
    classify: ClassifyConfig = field(default_factory=ClassifyConfig)
    """Classification."""
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    """Embeddings."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig, metadata=FREE)
    """The tokenized cache."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Samples per step."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Arithmetic of the model."""
    zero: ZeroConfig = field(default_factory=ZeroConfig, metadata=FREE)
    """What is split over the ranks."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How many ranks share one model."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig, metadata=FREE)
    """What computes the loss and the layers."""
    compile: CompileConfig = field(default_factory=CompileConfig, metadata=FREE)
    """torch.compile."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, and how."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=FREE)
    """What is kept on disk."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig, metadata=FREE)
    """Validation."""
    export: ExportConfig = field(default_factory=ExportConfig, metadata=FREE)
    """Conditions of publishing the model."""
    track: TrackConfig = field(default_factory=TrackConfig, metadata=FREE)
    """Trackers."""
    report: ReportConfig = field(default_factory=ReportConfig, metadata=FREE)
    """The run as a page to look at."""
    plan: PlanConfig = field(default_factory=PlanConfig, metadata=FREE)
    """Bounds."""
    profile: ProfileConfig = field(default_factory=ProfileConfig, metadata=FREE)
    """Measuring tools."""
    launch: LaunchConfig = field(default_factory=LaunchConfig, metadata=FREE)
    """Expectations of the launcher."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig, metadata=FREE)
    """Collectives."""
    ds_extra: dict[str, Any] = field(default_factory=dict)
    """Further DeepSpeed keys, nested as in its JSON; unknown names and keys that a section above owns are rejected."""
