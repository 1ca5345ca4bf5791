"""The source's module and the other ranks' modules are the same, for every way in which a class can be loaded."""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CLIPModel,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    LlamaConfig,
    LlamaForCausalLM,
    MobileNetV2Config,
    MobileNetV2Model,
    T5Config,
    T5EncoderModel,
    WhisperConfig,
    WhisperModel,
)

from safeload import CheckpointError, SafeLoadError, SourceError, safe_from_pretrained
from safeload.building import build_peer, build_source
from safeload.families import dtype_keyword
from safeload.fitting import check_kinds
from safeload.headers import TensorEntry
from safeload.placing import allocate, check_module, place
from safeload.planning import plan, segment_views
from safeload.recipes import Recipe, recipe_of
from safeload.requesting import KEYWORDS, Request, floating_dtype
from tests.towers import VISION, assert_equal_towers, clip_folder, edit_json, full_clip_folder, rewrite, tensors_of

CPU = torch.device("cpu")
LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=100,
    tie_word_embeddings=True,
)
BERT = BertConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, hidden_act="relu"
)
T5 = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100)
WHISPER = WhisperConfig(
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    vocab_size=51865,
)


def both(model_class, folder, *, dtype=None, config=None, weights=(), **kwargs):
    """Build on the source and, from what the source sends, on another rank; no process group needed."""
    source = build_source(
        model_class, folder, origin="here", dtype=dtype, config=config, weights=weights, model_kwargs=kwargs
    )
    sent = plan(source)
    recipe = Recipe.from_json(recipe_of(source, model_class, {}).to_json())
    peer = build_peer(model_class, recipe, origin="here", config=config, model_kwargs=kwargs)
    check_module(peer, sent)
    memory = allocate(sent, CPU)
    for to, of in zip(memory, segment_views(source, sent), strict=True):
        to.copy_(of)
    place(peer, sent, memory, device=CPU)
    return source, peer


def assert_twins(source, peer):
    assert type(source) is type(peer)
    assert_equal_towers(peer, source)
    assert not source.training
    assert not peer.training
    if isinstance(getattr(source, "config", None), transformers.PretrainedConfig):
        assert source.config.to_dict() == peer.config.to_dict()
        assert source.config._attn_implementation == peer.config._attn_implementation
        assert source.name_or_path == peer.name_or_path == "here"


CASES = {
    "one tower": (clip_folder, CLIPVisionModel, {}),
    "sharded": (lambda f: clip_folder(f, shard_size="100KB"), CLIPVisionModel, {}),
    "stored in fp16": (lambda f: clip_folder(f, dtype=torch.float16), CLIPVisionModel, {}),
    "an Auto class": (clip_folder, AutoModel, {}),
    "cast to bf16": (clip_folder, CLIPVisionModel, {"dtype": torch.bfloat16}),
    "half of a CLIPModel": (full_clip_folder, CLIPVisionModel, {}),
    "the other half": (full_clip_folder, CLIPTextModel, {"attn_implementation": "eager"}),
    "with projection": (full_clip_folder, CLIPVisionModelWithProjection, {}),
    "all of it": (full_clip_folder, CLIPModel, {}),
    "a keyword of the configuration": (clip_folder, CLIPVisionModel, {"attention_dropout": 0.5}),
    "tied, rotary, generating": (lambda f: LlamaForCausalLM(LLAMA).save_pretrained(f), LlamaForCausalLM, {}),
    "tied, in 20 KB shards": (
        lambda f: LlamaForCausalLM(LLAMA).save_pretrained(f, max_shard_size="20KB"),
        LlamaForCausalLM,
        {"dtype": torch.float16},
    ),
    "relative positions": (lambda f: T5EncoderModel(T5).save_pretrained(f), T5EncoderModel, {}),
    "a part switched off": (lambda f: BertModel(BERT).save_pretrained(f), BertModel, {"add_pooling_layer": False}),
    "the body of a model with a head": (
        lambda f: BertForMaskedLM(BERT).save_pretrained(f),
        BertModel,
        {"add_pooling_layer": False},
    ),
    "a speech model": (lambda f: WhisperModel(WHISPER).save_pretrained(f), WhisperModel, {}),
    "0-dim counters": (
        lambda f: MobileNetV2Model(MobileNetV2Config(depth_multiplier=0.35)).save_pretrained(f),
        MobileNetV2Model,
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_transformers_class(case, tmp_path):
    write, model_class, kwargs = CASES[case]
    write(tmp_path)
    source, peer = both(model_class, tmp_path, **kwargs)
    assert_twins(source, peer)
    dtype = kwargs.get("dtype", "auto")
    rest = {name: value for name, value in kwargs.items() if name != "dtype"}
    want = model_class.from_pretrained(tmp_path, **{dtype_keyword("transformers"): dtype}, **rest)
    assert_equal_towers(source, want)


def test_a_configuration_object_is_taken(tmp_path):
    config = CLIPVisionConfig(**VISION, attention_dropout=0.25)
    source, peer = both(CLIPVisionModel, clip_folder(tmp_path), config=config)
    assert_twins(source, peer)
    assert peer.config.attention_dropout == 0.25


def test_ties_are_one_object_on_every_rank(tmp_path):
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    for model in both(LlamaForCausalLM, tmp_path):
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_generation_configuration_comes_along(tmp_path):
    model = LlamaForCausalLM(LLAMA)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(tmp_path)
    source, peer = both(LlamaForCausalLM, tmp_path)
    assert source.generation_config.max_new_tokens == peer.generation_config.max_new_tokens == 17


def test_a_diffusers_class(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: it comes with the extra 'test'")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    diffusers.AutoencoderKL(block_out_channels=(32, 32), norm_num_groups=8, **blocks).save_pretrained(tmp_path)
    for dtype in (None, torch.bfloat16):
        source, peer = both(diffusers.AutoencoderKL, tmp_path, dtype=dtype)
        assert_twins(source, peer)
        assert_equal_towers(source, diffusers.AutoencoderKL.from_pretrained(tmp_path, torch_dtype=dtype).eval())
        assert dict(source.config) == dict(peer.config)


class Own(nn.Module):
    """A module of one's own, with a tie and with a constructor that reads a value."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4)
        self.tied = self.head
        self.width = float(torch.linspace(0, 1, 3)[-1].item())


def own_weights(path, prefix=""):
    state = Own().state_dict()
    save_file({prefix + name: value.clone() for name, value in state.items() if not name.startswith("tied")}, path)
    return state


def test_a_factory_even_one_that_cannot_run_on_meta(tmp_path):
    state = own_weights(tmp_path / "w.safetensors", prefix="model.")
    source, peer = both(Own, tmp_path, weights=[tmp_path / "w.safetensors"], key_mapping={"^model\\.": ""})
    assert_twins(source, peer)
    assert peer.width == 1.0
    assert peer.tied.weight is peer.head.weight
    assert torch.equal(source.head.weight, state["head.weight"])


def test_a_factory_is_cast_once(tmp_path):
    own_weights(tmp_path / "w.safetensors")
    source, peer = both(Own, tmp_path, weights=[tmp_path / "w.safetensors"], dtype=torch.bfloat16)
    assert_twins(source, peer)
    assert {value.dtype for value in source.parameters()} == {torch.bfloat16}


def spoiled(tmp_path, change):
    rewrite(clip_folder(tmp_path) / "model.safetensors", change)
    with pytest.raises(CheckpointError) as caught:
        build_source(CLIPVisionModel, tmp_path, origin="here")
    return caught.value


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if not key.endswith(name)}


def test_every_missing_tensor_is_named(tmp_path):
    error = spoiled(tmp_path, without("fc1.weight"))
    assert len(error.missing) == 2
    assert "encoder.layers.0.mlp.fc1.weight" in str(error)
    assert "would be random" in str(error)


def test_every_other_shape_is_named_with_both_sides(tmp_path):
    error = spoiled(
        tmp_path, lambda t: {key: value[:-1].clone() if "fc1.weight" in key else value for key, value in t.items()}
    )
    assert len(error.mismatched) == 2
    assert "[127, 64] in the checkpoint, [128, 64] in the module" in str(error)


@pytest.mark.parametrize("name", ["extra", "vision_model.encoder.layers.7.mlp.fc1.weight"])
def test_what_the_class_does_not_know_is_named(tmp_path, name):
    error = spoiled(tmp_path, lambda tensors: {**tensors, name: torch.ones(3)})
    assert len(error.unexpected) == 1


def test_a_layer_too_many_is_not_taken_for_another_part_of_a_larger_model(tmp_path):
    full_clip_folder(tmp_path)
    rewrite(
        tmp_path / "model.safetensors", lambda t: {**t, "vision_model.encoder.layers.7.mlp.fc1.weight": torch.ones(3)}
    )
    with pytest.raises(CheckpointError, match=r"layers\.7"):
        build_source(CLIPVisionModel, tmp_path, origin="here")


def test_left_over_keys_can_be_allowed_by_pattern(tmp_path):
    rewrite(clip_folder(tmp_path) / "model.safetensors", lambda tensors: {**tensors, "extra": torch.ones(3)})
    build_source(CLIPVisionModel, tmp_path, origin="here", ignore_unexpected=["^extra$"])


def test_a_pooler_that_the_checkpoint_lacks_is_an_error_not_a_random_layer(tmp_path):
    BertForMaskedLM(BERT).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.weight.*add_pooling_layer=False"):
        build_source(BertModel, tmp_path, origin="here")


def test_a_configuration_of_another_size_is_an_error(tmp_path):
    edit_json(clip_folder(tmp_path) / "config.json", hidden_size=32)
    with pytest.raises(CheckpointError) as caught:
        build_source(CLIPVisionModel, tmp_path, origin="here")
    assert len(caught.value.mismatched) > 20


def test_a_factory_must_fit_too(tmp_path):
    own_weights(tmp_path / "w.safetensors", prefix="model.")
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: body\.0"):
        build_source(Own, tmp_path, origin="here", weights=[tmp_path / "w.safetensors"])


def test_a_factory_must_return_a_module(tmp_path):
    with pytest.raises(SafeLoadError, match=r"expected a torch\.nn\.Module"):
        build_source(lambda: 3, tmp_path, origin="here")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"device_map": "auto"}, "device="),
        ({"quantization_config": object()}, "quantised"),
        ({"load_in_8bit": True}, "quantised"),
        ({"ignore_mismatched_sizes": True}, "random"),
        ({"state_dict": {"a": 1}}, "checkpoint alone"),
        ({"use_safetensors": False}, "allow_pickle"),
        ({"force_download": True}, "remove it"),
        ({"dtype": torch.float16, "torch_dtype": torch.float32}, "not both"),
        ({"torch_dtype": "float17"}, "floating"),
        ({"ignore_unexpected": ["fine", "("]}, "not a regular expression"),
        ({"ignore_unexpected": [3]}, "not a regular expression"),
        ({"timeout": 30}, "timedelta"),
        ({"timeout": timedelta(0)}, "positive"),
        ({"dtype": torch.float8_e4m3fn}, "floating"),
        ({"dtype": torch.int8}, "floating"),
        ({"dtype": "float17"}, "floating"),
        ({"transport": "pigeon"}, "broadcast"),
        ({"memory": "leaky"}, "sealed"),
        ({"verify": "maybe"}, "strict"),
        ({"config": "clip.json"}, "configuration object"),
        ({"device": "meta"}, "real device"),
        ({"device": "cuda:77"}, "cannot be used on this rank"),
        ({"device": "toaster"}, "cannot be used on this rank"),
        ({"pretrained_model_name_or_path": None}, "expected a folder"),
        ({"pretrained_model_name_or_path": ""}, "expected a folder"),
        ({"pretrained_model_name_or_path": b"x"}, "expected a folder"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_to_do(tmp_path, kwargs, words):
    clip_folder(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(SafeLoadError, match=words):
            safe_from_pretrained(CLIPVisionModel, **{"pretrained_model_name_or_path": tmp_path, **kwargs})


def test_an_unknown_keyword_is_called_that_and_a_near_one_is_named(tmp_path):
    clip_folder(tmp_path)
    with pytest.raises(SafeLoadError, match=r"no keyword 'verfy'.*CLIPVisionModel.*Did you mean verify=") as caught:
        safe_from_pretrained(CLIPVisionModel, tmp_path, verfy="strict")
    assert not isinstance(caught.value, CheckpointError)
    with pytest.raises(SafeLoadError, match=r"no keyword 'frobnicate', and neither has .*configuration\.$"):
        safe_from_pretrained(CLIPVisionModel, tmp_path, verify="off", frobnicate=1)


def test_the_keywords_are_those_of_the_function():
    import inspect

    kinds = inspect.signature(safe_from_pretrained).parameters.values()
    own = {each.name for each in kinds if each.kind is each.KEYWORD_ONLY}
    assert set(KEYWORDS) == own | {"trust_remote_code", "key_mapping", "attn_implementation"}


def test_a_model_class_must_be_callable(tmp_path):
    with pytest.raises(SafeLoadError, match="model_class"):
        safe_from_pretrained("CLIPVisionModel", tmp_path)


@pytest.mark.parametrize(
    ("model_class", "words"),
    [
        (nn.Linear(2, 2), "an instance of Linear: pass the class itself"),
        (CLIPVisionModel.from_pretrained, "pass CLIPVisionModel itself"),
        (AutoModel.from_pretrained, "pass AutoModel itself"),
    ],
)
def test_what_stands_for_a_class_by_mistake_is_refused(tmp_path, model_class, words):
    with pytest.raises(SafeLoadError, match=words):
        safe_from_pretrained(model_class, tmp_path)


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16", "auto", None])
def test_the_older_name_of_dtype_is_heard_too(tmp_path, spelling, dtype):
    clip_folder(tmp_path)
    tower = safe_from_pretrained(CLIPVisionModel, tmp_path, verify="off", **{spelling: dtype})
    expected = floating_dtype(dtype) or torch.float32
    assert {parameter.dtype for parameter in tower.parameters()} == {expected}


def test_safetensors_may_be_asked_for_by_name(tmp_path):
    clip_folder(tmp_path)
    safe_from_pretrained(CLIPVisionModel, tmp_path, verify="off", use_safetensors=True)


@pytest.mark.parametrize("named", ["folder", "file"])
@pytest.mark.parametrize("model_class", [CLIPVisionModel, AutoModel])
def test_weights_without_their_configuration_are_refused(tmp_path, model_class, named):
    """Where the class's defaults fit in shape, plain transformers takes another activation and says nothing."""
    path = tmp_path / "weights" / "model.safetensors"
    config = CLIPVisionConfig(hidden_act="gelu", hidden_size=64, num_attention_heads=4, intermediate_size=128)
    CLIPVisionModel(config).save_pretrained(path.parent)
    config = CLIPVisionConfig.from_pretrained(path.parent)
    (path.parent / "config.json").unlink()
    where = path if named == "file" else path.parent
    with pytest.raises(SourceError, match=r"no config\.json"):
        safe_from_pretrained(model_class, where, verify="off")
    tower = safe_from_pretrained(model_class, where, verify="off", config=config)
    assert tower.config.hidden_act == "gelu"


def test_one_pattern_of_left_over_keys_may_be_a_plain_string(tmp_path):
    """Taken letter by letter it would let any key be left over."""
    clip_folder(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors | {"encoder.stray": torch.ones(1)})
    with pytest.raises(CheckpointError, match="stray"):
        safe_from_pretrained(CLIPVisionModel, tmp_path, verify="off", ignore_unexpected="other_keys")
    safe_from_pretrained(CLIPVisionModel, tmp_path, verify="off", ignore_unexpected=r"^encoder\.stray$")


def test_what_the_library_says_names_the_checkpoint_not_the_private_folder(tmp_path):
    clip_folder(tmp_path)
    edit_json(tmp_path / "config.json", model_type="unheard-of")
    with pytest.raises(CheckpointError, match=rf"AutoModel\.from_pretrained.*{tmp_path}") as caught:
        safe_from_pretrained(AutoModel, tmp_path, verify="off")
    assert "safeload-" not in str(caught.value)


def test_dtypes_are_read_in_all_their_spellings():
    assert floating_dtype("bfloat16") is floating_dtype("torch.bfloat16") is floating_dtype(torch.bfloat16)
    assert floating_dtype(None) is floating_dtype("auto") is None


def test_a_statement_is_the_same_in_every_process(tmp_path):
    """Nothing in it depends on an address or on the order of keywords, and no secret is in it."""

    def stated(**kwargs):
        where = {**dict.fromkeys(("revision", "subfolder", "variant")), "token": "hf_secret"}
        fields = {**dict.fromkeys(Request.__dataclass_fields__), "path": "x", "where": where}
        return json.dumps(Request(**{**fields, "model_class": partial(Own), "model_kwargs": kwargs}).statement())

    assert stated(a=Own(), b={"y": 1, "x": [2]}) == stated(b={"x": [2], "y": 1}, a=Own())
    assert stated(a=1) != stated(a=2)
    assert "hf_secret" not in stated()
    assert " at 0x" not in stated(a=Own())


def test_a_tower_from_plain_and_from_safe_loading_computes_the_same(tmp_path):
    pixels = torch.rand(2, 3, 32, 32)
    clip_folder(tmp_path)
    tower = safe_from_pretrained(CLIPVisionModel, tmp_path, verify="off")
    want = CLIPVisionModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(tower(pixels).last_hidden_state, want(pixels).last_hidden_state)
    assert isinstance(tower, CLIPVisionModel)
    assert tensors_of(tower).keys() == tensors_of(want).keys()


@pytest.mark.parametrize("prefix", ["", "model."])
def test_kinds_of_numbers_are_compared_by_name_not_by_a_common_end(prefix):
    module = nn.Module()
    module.inner = nn.Linear(2, 2, bias=False)
    module.register_buffer("weight", torch.zeros(2, dtype=torch.int64))

    def entries(*stated):
        return [TensorEntry(name=name, dtype=dtype, shape=(2,), begin=0, end=0) for name, dtype in stated]

    check_kinds(module, entries((f"{prefix}inner.weight", "F32"), ("weight", "I64")), "here")
    with pytest.raises(CheckpointError, match=r"inner\.weight \(I8 in the checkpoint, float32 in the module\)"):
        check_kinds(module, entries((f"{prefix}inner.weight", "I8"), ("weight", "I64")), "here")
