"""The mask token: an id that text never contains."""

from transformers import PreTrainedTokenizerBase

from peagle.errors import InputError


def check_mask_token(token: int, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise InputError unless `token` may serve as the mask token."""
    if why := why_unfit(token, tokenizer, vocab_size):
        raise InputError(why, field="mask_token_id", value=token, fix="choose another id")


def why_unfit(token: int, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """The reason why `token` cannot serve as the mask token; empty where it can."""
    if not 0 <= token < vocab_size:
        return f"is outside the embedding (0 to {vocab_size - 1})"
    if token in _used_by_template(tokenizer):
        return "is used by the tokenizer (pad, bos, eos) or its chat template"
    added = tokenizer.added_tokens_decoder
    if token < len(tokenizer) and token not in added:
        return "is an ordinary token: text can produce it"
    return ""


def _used_by_template(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    used = {getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "unk")}
    template = str(tokenizer.chat_template or "")
    used |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in template}
    return {i for i in used if i is not None}
