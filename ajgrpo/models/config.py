"""What the decoder needs to know of a model, read from a Hugging Face ``config.json``.

One decoder serves all families; they differ in the fields of ``ModelConfig`` and in nothing else.
Left out: dropout (policies are trained without it) and every quantised format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ajgrpo.errors import CheckpointError, UnsupportedModelError
from ajgrpo.models.rope import ROPE_TYPES, RopeConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family differs from Llama, and its defaults for keys that ``config.json`` may lack.

    Attributes:
        architecture: the class name that ``architectures`` must hold.
        qkv_bias, output_bias: whether attention has biases; None: ``attention_bias`` says so.
        has_mlp_bias: whether the family knows ``mlp_bias``.
        qk_norm: whether queries and keys of each head are normalised.
        head_dim: default; None: hidden_size / num_attention_heads.
        max_position_embeddings: default.
        sliding_windows: whether the family knows ``use_sliding_window``.
    """

    architecture: str
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    has_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    sliding_windows: bool = True


FAMILIES = {
    "llama": Family("LlamaForCausalLM", has_mlp_bias=True, max_position_embeddings=2048, sliding_windows=False),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, output_bias=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}

SUPPORTED = (
    f"supported are the model types {', '.join(FAMILIES)} (text only, SwiGLU) with rope types {', '.join(ROPE_TYPES)}; "
    "not supported are mixtures of experts, attention sinks, quantised weights and other activations"
)

REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model. Hashable, so that it can be a static argument of jitted functions.

    Attributes:
        model_type: the family's name in ``config.json``; the key of its checkpoint table.
        vocab_size: V.
        hidden_size: H.
        intermediate_size: F, width of the MLP.
        num_layers: L.
        num_heads, num_kv_heads: N query heads share G key-value heads; G divides N.
        head_dim: D.
        rms_norm_eps: epsilon of every norm.
        rope: position embedding.
        attention_bias: biases on query, key and value projections.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases on the three MLP projections.
        qk_norm: RMSNorm over D on the queries and keys of each head, before the rotation.
        tie_word_embeddings: the head is the embedding.
        max_position_embeddings: the longest sequence that the model was made for, in tokens.
        layer_windows: for each layer the sliding window in tokens, 0 for full attention.
        attn_softcap, logit_softcap: soft caps ``c·tanh(x/c)`` on attention scores and logits; None: no cap.
        eos_token_ids: tokens that end a generation.
        bos_token_id, pad_token_id: None where the model has none.
        dtype: dtype of the checkpoint, as ``config.json`` states it.
        initializer_range: standard deviation of fresh weights.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    layer_windows: tuple[int, ...] = ()
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str = "float32"
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (0,) * self.num_layers)
        if violations := self._violations():
            raise CheckpointError("the model's config.json is inconsistent: " + "; ".join(violations))

    @property
    def attention_scale(self) -> float:
        """What ``attend`` multiplies the scores with."""
        return self.head_dim**-0.5

    @property
    def length_limit(self) -> int | None:
        """Longest sequence, in tokens, that may be packed or batched with others; None: any (see ``models.rope``)."""
        return self.rope.length_limit

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads the content of ``config.json``, in the spelling of any transformers version.

        Args:
            config: ``config.json``.
            generation_config: ``generation_config.json``; its end-of-sequence tokens are added.

        Raises:
            UnsupportedModelError: the model is not implemented; says what is.
            CheckpointError: keys are missing or contradict each other.
        """
        family = _family(config)
        if missing := [key for key in REQUIRED_KEYS if config.get(key) is None]:
            raise CheckpointError(f"the model's config.json lacks {', '.join(missing)}")
        heads = config["num_attention_heads"]
        max_positions = config.get("max_position_embeddings") or family.max_position_embeddings
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=config["model_type"],
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or family.head_dim or config["hidden_size"] // heads,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, max_positions),
            attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=family.has_mlp_bias and bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=max_positions,
            layer_windows=_layer_windows(config) if family.sliding_windows else (),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            bos_token_id=config.get("bos_token_id"),
            pad_token_id=config.get("pad_token_id"),
            dtype=_dtype(config),
            initializer_range=float(config.get("initializer_range", 0.02)),
        )

    def _violations(self) -> list[str]:
        rules = (
            (
                min(self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers, self.num_heads) > 0,
                "sizes must be positive",
            ),
            (
                self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
                f"num_attention_heads={self.num_heads} is no multiple of num_key_value_heads={self.num_kv_heads}",
            ),
            (self.head_dim > 0 and self.head_dim % 2 == 0, f"head_dim={self.head_dim} is not even"),
            (
                len(self.layer_windows) == self.num_layers,
                f"{len(self.layer_windows)} layer types for {self.num_layers} layers",
            ),
            *(
                (
                    self.rope.type != "longrope" or len(getattr(self.rope, name)) == self.head_dim // 2,
                    f"rope {name} must hold head_dim / 2 = {self.head_dim // 2} numbers",
                )
                for name in ("short_factor", "long_factor")
            ),
        )
        return [message for holds, message in rules if not holds]


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type or "")
    if family is None:
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported; {SUPPORTED}")
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise UnsupportedModelError(
            f"architecture {', '.join(architectures)} is not supported: a {model_type} policy must be a "
            f"{family.architecture}; {SUPPORTED}"
        )
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown method")
        raise UnsupportedModelError(f"quantised weights ({method}) are not supported: use the original; {SUPPORTED}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported, silu is; {SUPPORTED}")
    return family


def _layer_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """``layer_types`` decides where it is given; else layers from ``max_window_layers`` on slide."""
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if window and layer >= first else 0 for layer in range(num_layers))
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(f"layer types {', '.join(unknown)} are not supported; {SUPPORTED}")
    if "sliding_attention" in kinds and not window:
        raise CheckpointError("layer_types names sliding_attention, but use_sliding_window or sliding_window is unset")
    return tuple(window if kind == "sliding_attention" and window else 0 for kind in kinds)


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        ids.extend([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(dict.fromkeys(ids))


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name
