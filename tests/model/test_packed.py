"""Packed weights: the products of nn.Linear, and weights that are still there to be read. Both ways
to pack are tested, as far as this CPU has them."""

import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, PLAIN, build, random_ids
from tiny import METHODS, make_drafter, make_target
from torch import Tensor, nn
from transformers import LlamaConfig

from peagle.engine.llm import LLM
from peagle.engine.request import SamplingParams
from peagle.model import native
from peagle.model.attend import CausalAttend
from peagle.model.checkpoint import save_drafter
from peagle.model.config import Method
from peagle.model.drafter import Drafter
from peagle.model.packed import PackedLinear, TiledLinear, pack
from peagle.model.shape import HeadSpec
from peagle.model.source import load_target
from peagle.model.target import Target
from peagle.train.start import new_drafter

SUPPORTED = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
WAYS = (PackedLinear, TiledLinear)
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (8192, 576), (97, 33)]
STEP = 2.0**-8  # of bf16: half a unit in the last place, relatively


def linear(outputs: int, inputs: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


def packed_layers(module: nn.Module) -> int:
    return sum(isinstance(part, WAYS) for part in module.modules())


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """What bf16 layers are replaced by."""
    if request.param is TiledLinear and not native.tiles():
        pytest.skip("this CPU has no tiles (AMX)")
    if request.param is PackedLinear:
        monkeypatch.setattr(native, "tiles", lambda: False)
        if not SUPPORTED:
            pytest.skip("this CPU has no bf16 products in oneDNN")
    return request.param


def run(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    target.tap((0, 2))
    out = target.forward(ids, torch.arange(len(ids)), CausalAttend())
    assert out.features is not None
    return target.logits(out.hidden), out.features


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_linear_within_rounding(
    way: type[nn.Module], outputs: int, inputs: int, bias: bool
) -> None:
    plain = linear(outputs, inputs, bias=bias)
    packed = pack(nn.Sequential(plain))[0].requires_grad_(False)
    assert isinstance(packed, way) or (outputs, inputs) == (97, 33), "which fill no tiles"
    for rows in (1, 4, 8, 17, 40, 64, 128, 300):
        x = torch.randn(1, rows, inputs).bfloat16()
        with torch.no_grad():
            found = packed(x).double()
        exact = F.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
        # float32 sums and one rounding to bf16; the sums' own error is far below it
        bound = exact.abs() * STEP + 1e-5
        assert ((found - exact).abs() <= bound).all(), rows


@torch.no_grad()
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_do_not_depend_on_rows_beside_them(
    way: type[nn.Module], outputs: int, inputs: int
) -> None:
    packed = pack(nn.Sequential(linear(outputs, inputs)))[0]
    x = torch.randn(8, inputs).bfloat16()
    together = packed(x)
    for row in range(8):
        padded = F.pad(x[row : row + 1], (0, 0, 0, 7))  # as a tile of the deterministic mode
        assert torch.equal(packed(padded)[0], together[row])
        if isinstance(packed, TiledLinear):
            assert torch.equal(packed(x[row : row + 1])[0], together[row])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_packed_equals_unpacked(family: str) -> None:
    """Within what bf16 products round, which is nothing on CPUs with AMX."""
    target = Target(build(FAMILIES[family]()).bfloat16(), None, family)
    ids = random_ids(9)
    plain = run(target, ids)
    for found, expected in zip(run(target.pack(), ids), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)
    assert packed_layers(target.model) or family == "gpt2"  # which has no nn.Linear but its head


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_fingerprint_and_weights_stay_readable(tied: bool) -> None:
    config = LlamaConfig(**PLAIN | {"tie_word_embeddings": tied})
    target = Target(build(config).bfloat16(), None, "tiny")
    table, fingerprint = target.embedding.clone(), target.weights_hash()
    weights = {name: value.clone() for name, value in target.model.state_dict().items()}
    target.pack()
    assert torch.equal(target.embedding, table) and target.weights_hash() == fingerprint
    assert isinstance(target.model.lm_head, WAYS)
    assert isinstance(target._head.lm_head, WAYS), "the head that logits are taken with"
    found = target.model.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_weights_are_kept_once(way: type[nn.Module]) -> None:
    """In oneDNN's layout the plain ones are gone; tiles read these."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16}
    target = Target(build(LlamaConfig(**PLAIN | sizes)).bfloat16(), None, "tiny")
    before = [weakref.ref(m.weight) for m in target.model.modules() if type(m) is nn.Linear]
    target.pack()
    assert len(before) == 4 * 7 + 1
    if way is TiledLinear:
        assert all(isinstance(reference(), nn.Parameter) for reference in before)
        return
    assert not any(reference() is not None for reference in before)
    matrices = [name for name, p in target.model.named_parameters() if p.ndim > 1]
    assert matrices == ["model.embed_tokens.weight"]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("method", METHODS)
def test_a_packed_head_is_saved_as_it_was(method: Method, tmp_path: Path) -> None:
    drafter = make_drafter(make_target(), method).bfloat16()
    save_drafter(drafter, tmp_path / "plain")
    save_drafter(pack(drafter), tmp_path / "packed")
    assert packed_layers(drafter) == 2 * 7 + 2
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "packed" / file.name).read_bytes()


@pytest.mark.usefixtures("way")
def test_a_new_head_starts_from_a_packed_target_as_from_a_plain_one() -> None:
    spec = HeadSpec(layers=2, draft_vocab=64, feature_layers=(1, 2, 3))
    target = make_target()
    target = Target(target.model.bfloat16(), target.tokenizer, "tiny")
    heads = []
    for made in (target, target.pack()):
        torch.manual_seed(0)
        heads.append(new_drafter(made, [[5, 6, 7]], spec).state_dict())
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


@pytest.mark.usefixtures("way")
def test_an_engine_packs_what_it_loads_and_nothing_else(tmp_path: Path) -> None:
    target = make_target(layers=7)
    target.model.bfloat16().save_pretrained(tmp_path / "target")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(tmp_path / "target")
    plain = load_target(str(tmp_path / "target"))
    save_drafter(make_drafter(plain, "p-eagle"), tmp_path / "head")
    drafter = Drafter.load(tmp_path / "head", plain)
    given = LLM(plain.lean(), drafter)
    assert packed_layers(plain.model) == packed_layers(drafter) == 0
    loaded = LLM(str(tmp_path / "target"), tmp_path / "head")
    assert loaded.drafter is not None
    assert packed_layers(loaded.target.model) == 7 * 7 + 1 and packed_layers(loaded.drafter) == 16
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    said = [llm.generate([[5, 6, 7], [9, 8]], params) for llm in (given, loaded)]
    assert [a.token_ids for a in said[0]] == [a.token_ids for a in said[1]]


def test_float32_layers_stay() -> None:
    target = make_target().pack()
    assert packed_layers(target.model) == 0


def test_a_cpu_without_bf16_products_keeps_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(native, "tiles", lambda: False)
    assert packed_layers(pack(nn.Sequential(linear(64, 32)))) == 0
