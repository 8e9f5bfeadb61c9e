"""``offload``: models of ``transformers`` give the same results while their layers are elsewhere."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from backfill import InvalidOption, offload
from backfill.execution.offloading import LayerStreamer
from backfill.llm import offload as module
from backfill.llm import offloaded_layers

NUM_LAYERS = 7
SHAPE: dict[str, Any] = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=NUM_LAYERS, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2, **SHAPE,
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=48, ffn_dim=96, num_hidden_layers=NUM_LAYERS, num_attention_heads=6, init_std=0.2,
        word_embed_proj_dim=48, **SHAPE,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=48, n_layer=NUM_LAYERS, n_head=6, initializer_range=0.2, **SHAPE,
    ),
}  # fmt: skip
INPUT = (torch.arange(34).view(2, 17) * 5 + 3) % 131


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(offloaded_layers, "cache_root", lambda: tmp_path)
    return tmp_path


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype).eval()


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(INPUT).logits
    return found


def tokens(model: Any) -> Tensor:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5}
    torch.manual_seed(5)
    found: Tensor = model.generate(INPUT, attention_mask=torch.ones_like(INPUT), **options)
    return found


def layer_bytes(model: Any) -> int:
    """Of all decoder layers' weights that are in memory."""
    return sum(each.nbytes for name, each in model.named_parameters() if "layers." in name or ".h." in name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_and_tokens_are_those_of_the_model_at_every_interval(kind: str) -> None:
    model = model_of(kind)
    expected_logits, expected_tokens = logits(model), tokens(model)
    all_bytes = layer_bytes(model)
    handle = offload(model, interval=1)
    for interval in (1, 3, NUM_LAYERS, 2):
        if interval != handle.interval:
            handle.set_interval(interval)
        assert torch.equal(logits(model), expected_logits)
        assert torch.equal(tokens(model), expected_tokens)
        held = {1: 2, 2: 6, 3: 7, NUM_LAYERS: 7}[interval]
        assert layer_bytes(model) * NUM_LAYERS == all_bytes * held
    handle.remove()
    handle.remove()
    assert layer_bytes(model) == all_bytes
    assert torch.equal(logits(model), expected_logits)


def test_as_a_context_manager_it_restores_the_weights(cache: Path) -> None:
    model = model_of("llama", torch.bfloat16)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    with torch.inference_mode(), offload(model, interval=2) as handle:
        assert list((cache / "packed").iterdir()) == [], "the file has no name"
        assert handle.device == torch.device("cpu")
        assert torch.isfinite(logits(model)).all()
        assert handle.stall_s >= 0.0
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert hooks == [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]


def fail(*_: object) -> None:
    raise KeyError("stopped")


def errors_of_a_thread(model: Any) -> list[str]:
    """What a pass in another thread raises."""
    errors: list[str] = []

    def run() -> None:
        try:
            logits(model)
        except (RuntimeError, KeyError) as error:
            errors.extend(error.args)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def test_a_pass_that_fails_leaves_the_next_one_right_in_any_thread() -> None:
    model = model_of("llama")
    expected = logits(model)
    offload(model, interval=1)
    hook = model.model.layers[4].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="stopped"):
        logits(model)
    assert errors_of_a_thread(model) == ["stopped"]
    hook.remove()
    assert torch.equal(logits(model), expected)


def test_a_thread_beside_another_is_refused() -> None:
    model = model_of("llama")
    expected = logits(model)
    offload(model, interval=1)
    refused: list[str] = []
    hook = model.model.layers[3].register_forward_hook(lambda *_: refused.extend(errors_of_a_thread(model)))
    assert torch.equal(logits(model), expected)
    hook.remove()
    assert refused == ["another thread runs the model; offloaded layers serve one at a time"]
    assert errors_of_a_thread(model) == [], "the other one's pass is over"


def test_an_interval_that_cannot_be_begun_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    expected = logits(model)
    handle = offload(model, interval=2)
    failures = [True]

    def create(*arguments: Any) -> Any:
        if failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        return LayerStreamer(*arguments)

    monkeypatch.setattr(module, "LayerStreamer", create)
    with pytest.raises(RuntimeError, match="new thread"):
        handle.set_interval(1)
    assert handle.interval == 2
    assert torch.equal(logits(model), expected)
    failures += [True, True]
    with pytest.raises(RuntimeError, match="new thread"):
        handle.set_interval(1)
    assert handle.stall_s == 0.0
    with pytest.raises(RuntimeError, match="no weights since an error; call `remove`"):
        logits(model)
    handle.remove()
    assert torch.equal(logits(model), expected)


def test_a_removal_that_fails_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    expected = logits(model)
    handle = offload(model, interval=2)
    with monkeypatch.context() as changed:
        changed.setattr(offloaded_layers.ModuleLayers, "restore", fail)
        with pytest.raises(KeyError):
            handle.remove()
        with pytest.raises(RuntimeError, match="no weights since an error; call `remove`"):
            logits(model)
    handle.remove()
    assert torch.equal(logits(model), expected)


def test_what_was_moved_beside_the_layers_is_moved_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("opt")
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    parameters = module._others(model, module._decoder_layers(model))
    moved = offloaded_layers.MovedOthers(model, parameters)
    with monkeypatch.context() as changed:
        changed.setattr(Tensor, "to", lambda tensor, _: tensor.clone())  # as to another device
        moved.move_to(torch.device("cuda"))
    assert not {each.data_ptr() for each in parameters} & set(before.values())
    moved.move_back()
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before


def test_a_move_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("opt")
    expected = logits(model)

    def fail(moved: Any, _: torch.device) -> None:
        moved._parameters[0][0].data = torch.empty(0)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as changed:
        changed.setattr(offloaded_layers.MovedOthers, "move_to", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            offload(model, interval=1)
    assert torch.equal(logits(model), expected)
    with offload(model, interval=1):
        assert torch.equal(logits(model), expected)


def test_a_model_and_its_layers_are_freed_together() -> None:
    model = model_of("opt")
    handle = weakref.ref(offload(model, interval=2))
    gc.collect()
    assert handle() is not None, "it lives as long as the model"
    del model
    gc.collect()
    assert handle() is None


def test_gradients_and_states_are_refused() -> None:
    model = model_of("llama")
    with offload(model, interval=1) as handle:
        with pytest.raises(RuntimeError, match=r"run the model in torch\.inference_mode\(\) or"):
            model(INPUT)
        with pytest.raises(RuntimeError, match="call `remove` first"):
            model.state_dict()
        with pytest.raises(InvalidOption, match="offloaded already; call remove"):
            offload(model)
        with pytest.raises(InvalidOption, match=r"interval must be a whole number from 1 to 7, .* got 8"):
            handle.set_interval(8)
    with pytest.raises(InvalidOption, match="the handle was removed; call offload again"):
        handle.set_interval(1)


@pytest.mark.parametrize(
    "convert", [lambda model: model.half(), lambda model: model.model.layers[0].to(torch.float64)]
)
def test_a_model_is_not_converted_until_it_is_restored(convert: Callable[[Any], Any]) -> None:
    model = model_of("llama")
    expected = logits(model)
    with offload(model, interval=2):
        with pytest.raises(RuntimeError, match=r"stay torch\.float32 on cpu; call `remove` of the handle"):
            convert(model)
        assert model.to("cpu").float() is model
        assert torch.equal(logits(model), expected)
    convert(model)
    assert {each.dtype for each in model.parameters()} != {torch.float32}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_model_is_not_copied_until_it_is_restored(duplicate: Callable[[Any], Any]) -> None:
    model = model_of("llama")
    with offload(model, interval=2) as handle:
        for each in (model, handle):
            if (each, duplicate) != (model, copy.copy):  # which shares the layers, and is the same model
                with pytest.raises(RuntimeError, match="cannot be copied; call `remove` of its handle first"):
                    duplicate(each)
    duplicate(model)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[1].weight = self.layers[0].weight


class Unlike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Linear(3, 3), r"model has no decoder layers: it must be .* model\.layers of Llama.* got Linear"),
        (nn.ModuleList([nn.Linear(3, 3)]), "model has no decoder layers"),
        ("a name", r"model must be a torch\.nn\.Module, a decoder with .* got 'a name'"),
        (Shared(), "model has layers that share parameters"),
        (Unlike(), "layers of several kinds: 1 does not have the parameters of 0"),
        (Unlike().to("meta"), "meta device, without weights"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_other_models_are_refused_with_what_is_allowed(given: Any, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        offload(given, interval=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(((given,), "interval must be a whole number from 1 to 7") for given in (0, 8, 2.0, True, "2")),
        *(((1, device), "device must be cpu or cuda, got") for device in ("meta", "nowhere", "mps")),
    ],
)
def test_other_intervals_and_devices_are_refused(options: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        offload(model_of("llama"), *options)


@pytest.mark.gpu
def test_on_cuda() -> None:
    model = model_of("llama").cuda()
    with torch.inference_mode():
        expected = model(INPUT.cuda()).logits.cpu()
        model = model.cpu()
        for interval in (1, 2, 3, NUM_LAYERS):
            with offload(model, interval, device="cuda"):
                assert torch.equal(model(INPUT.cuda()).logits.cpu(), expected)
            assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cpu"}
