"""Our plugin of vLLM, packages/peagle-vllm, with stand-ins for what it imports of vLLM.

`test_parity.py` runs it in the real one.
"""

import importlib
import json
import logging
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from corrected_heads import corrected
from safetensors.torch import load_file, save_file
from tiny import make_drafter, make_target
from torch import Tensor, nn

from peagle.heads.save import save_drafter
from peagle.model.drafter import Drafter

PACKAGE = Path(__file__).resolve().parents[2] / "packages" / "peagle-vllm"
K = 4


class Registry:
    """The part of vLLM's ModelRegistry that plugins call."""

    known: ClassVar[dict[str, str]] = {}

    @classmethod
    def register_model(cls, name: str, model: str) -> None:
        cls.known[name] = model


class VllmDrafter(nn.Module):
    """vLLM's drafter, with the interface that the plugin extends."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.drafter: Drafter = vllm_config.drafter
        sizes = self.drafter.config
        self.config = SimpleNamespace(
            vocab_size=sizes.transformer.vocab_size, draft_vocab_size=sizes.draft_vocab_size
        )
        self.model = SimpleNamespace(norm=self.drafter.norm, embed_tokens=self.drafter.embed)
        all_drafted = sizes.draft_vocab_size == sizes.transformer.vocab_size
        self.draft_id_to_target_id = None if all_drafted else self.drafter.d2t

        self.lm_head = self.drafter.logits
        self.logits_processor = SimpleNamespace(get_top_k_tokens=get_top_k_tokens)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.names = [name for name, _ in weights]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return in_target(self.drafter, self.drafter.logits(hidden_states))

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        return self.compute_logits(hidden_states).argmax(-1)


def get_top_k_tokens(lm_head: Any, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids in the draft vocabulary, and logits."""
    best, ids = lm_head(states).topk(count)
    return ids, best


def in_target(drafter: Drafter, logits: Tensor) -> Tensor:
    """Draft logits (R, V_d) among those of all tokens (R, V)."""
    size = (len(logits), drafter.config.transformer.vocab_size)
    found = logits.new_full(size, float("-inf"))
    found[:, drafter.target_ids] = logits
    return found


def read_json(name: str, model: str, _: str | None) -> Any:
    file = Path(model, name)
    return json.loads(file.read_text()) if file.is_file() else None


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in; the plugin can be imported."""
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"ModelRegistry": Registry, "__version__": "0.32.1"},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.model_loader.default_loader": {
            "DefaultModelLoader": SimpleNamespace(Source=lambda *a, **b: SimpleNamespace(**b))
        },
        "vllm.model_executor.models.llama_eagle3": {"Eagle3LlamaForCausalLM": VllmDrafter},
        "vllm.model_executor.models.qwen3_eagle3": {"Eagle3Qwen3ForCausalLM": VllmDrafter},
        "vllm.transformers_utils.repo_utils": {"get_hf_file_to_dict": read_json},
    }
    for name in ("vllm.model_executor", "vllm.model_executor.models"):
        parts[name] = {}
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(PACKAGE)
    for name in ("peagle_vllm", "peagle_vllm.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(Registry, "known", {})
    return sys.modules["vllm"]


@pytest.fixture(params=[64, 128], ids=["a part is drafted", "all is drafted"])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return corrected(make_drafter(make_target(), "p-eagle", draft_vocab=request.param))


@pytest.fixture
def head(drafter: Drafter, tmp_path: Path) -> Path:
    save_drafter(drafter, tmp_path / "head", "vllm", dtype=None)
    return tmp_path / "head"


Load = Callable[..., Any]


@pytest.fixture
def load(vllm: ModuleType, drafter: Drafter, head: Path) -> Load:
    """Load the head as vLLM's loader does."""

    def run(*, second: bool = True, **changes: Any) -> Any:
        draft = SimpleNamespace(model=str(head), revision=None)
        how = {"num_speculative_tokens": K, "parallel_drafting": True}
        how |= {"draft_model_config": draft, **changes}
        config = SimpleNamespace(speculative_config=SimpleNamespace(**how), drafter=drafter)
        made = importlib.import_module("peagle_vllm.model").CorrectedLlama(vllm_config=config)
        sources = [(head, "")]
        if second:
            sources += [
                (head / source.subfolder, source.prefix)
                for source in getattr(made, "secondary_weights", [])
            ]
        made.load_weights(
            (prefix + name, tensor)
            for folder, prefix in sources
            for name, tensor in load_file(folder / "model.safetensors").items()
        )
        return made

    return run


def chain(drafter: Drafter, normed: Tensor) -> Tensor:
    """Logits (K, V_d) of a request with states (K, D), as our engine corrects them; the first place
    as it is."""
    assert drafter.correction is not None
    logits = [drafter.logits(normed[:1])]
    for place in range(1, len(normed)):
        before = drafter.embed(drafter.target_ids[logits[-1].argmax(-1)])
        own = drafter.logits(normed[place : place + 1])
        logits.append(drafter.correction.apply_to(own, normed[place : place + 1], before))
    return torch.cat(logits)


@torch.no_grad()
def test_logits_are_those_of_our_chain(load: Load, drafter: Drafter) -> None:
    made = load()
    normed = torch.randn(3 * K, drafter.config.transformer.hidden_size)
    wanted = torch.cat([chain(drafter, each) for each in normed.split(K)])
    found, plain = made.compute_logits(normed), in_target(drafter, drafter.logits(normed))
    torch.testing.assert_close(found, in_target(drafter, wanted))
    assert torch.equal(made.get_top_tokens(normed), found.argmax(-1))
    assert torch.equal(made.get_top_tokens(normed[:-1]), plain[:-1].argmax(-1))
    assert (found.argmax(-1) != plain.argmax(-1)).float().mean() > 0.3
    torch.testing.assert_close(found.exp().sum(-1), plain.exp().sum(-1))
    assert torch.equal(made.compute_logits(normed[:-1]), plain[:-1]), "rows of no K: a dummy run"
    assert not any(name.startswith("correction") for name in made.names)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"parallel_drafting": False}, "parallel_drafting is not set"),
        ({"second": False}, "its load format reads no second folder"),
    ],
)
@torch.no_grad()
def test_off_in_one_line(
    load: Load, drafter: Drafter, caplog: Any, given: dict[str, Any], says: str
) -> None:
    made = load(**given)
    [record] = caplog.records
    assert says in record.getMessage() and "\n" not in record.getMessage()
    normed = torch.randn(K, drafter.config.transformer.hidden_size)
    plain = in_target(drafter, drafter.logits(normed))
    assert torch.equal(made.compute_logits(normed), plain)


@torch.no_grad()
def test_without_a_correction(load: Load, drafter: Drafter, head: Path, caplog: Any) -> None:
    (head / "correction" / "config.json").unlink()
    normed = torch.randn(K, drafter.config.transformer.hidden_size)
    plain = in_target(drafter, drafter.logits(normed))
    assert torch.equal(load().compute_logits(normed), plain) and not caplog.records


def test_a_correction_of_another_head(load: Load, head: Path) -> None:
    about = json.loads((head / "correction" / "config.json").read_text())
    (head / "correction" / "config.json").write_text(json.dumps(about | {"head": "0" * 16}))
    with pytest.raises(ValueError, match=f"^{head}/correction: .*another head.*; export"):
        load()


def test_a_damaged_correction(load: Load, head: Path) -> None:
    file = head / "correction" / "model.safetensors"
    save_file({"state.weight": load_file(file)["state.weight"]}, file)
    with pytest.raises(ValueError, match=f"^{head}/correction: its tensors are .*; export"):
        load()


def register() -> None:
    importlib.import_module("peagle_vllm").register()


def test_registered_twice_is_registered_once(vllm: ModuleType, caplog: Any) -> None:
    register()
    first = dict(Registry.known)
    register()
    assert first == Registry.known and not caplog.records
    model = importlib.import_module("peagle_vllm.model")
    for target in first.values():
        module, _, drafter = target.partition(":")
        assert module == model.__name__ and issubclass(getattr(model, drafter), VllmDrafter)
    entries = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entries == {"vllm.general_plugins": {"peagle": "peagle_vllm:register"}}


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0rc1", "1.0"])
def test_an_untested_version(vllm: ModuleType, caplog: Any, version: str) -> None:
    vllm.__version__ = version  # type: ignore[attr-defined]
    register()
    [record] = caplog.records
    assert not Registry.known
    assert record.getMessage().endswith(f"tested with vLLM 0.32 and not {version}")


def test_a_vllm_without_the_hook(vllm: ModuleType, caplog: Any) -> None:
    del vllm.ModelRegistry
    register()
    [record] = caplog.records
    assert "this vLLM takes no models of plugins" in record.getMessage()
