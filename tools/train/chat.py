"""Messages to token ids in DeepSeek-V4's chat mode, with the mask of the tokens the assistant has to write."""

from collections.abc import Sequence

from corpus import Message
from tokenizer import ASSISTANT, BOS, END_THINK, EOS, USER
from tokenizers import Tokenizer


class Chat:
    """BOS system `<｜User｜>` user `<｜Assistant｜></think>` answer EOS `<｜User｜>` ... (no spaces in between)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        ids = {token: vocabulary[token] for token in (BOS, EOS, USER, ASSISTANT, END_THINK)}
        self.tokenizer, self.bos, self.eos = tokenizer, ids[BOS], ids[EOS]
        self.user, self.assistant = [ids[USER]], [ids[ASSISTANT], ids[END_THINK]]

    def text(self, content: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(content, add_special_tokens=False).ids
        return ids

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and, per id, whether the assistant wrote it (its answer and the EOS after it)."""
        ids, written = [self.bos], [False]
        for message in messages:
            own = message.role == "assistant"
            head = {"system": [], "user": self.user, "assistant": self.assistant}[message.role]
            body = self.text(message.content) + ([self.eos] if own else [])
            ids += head + body
            written += [False] * len(head) + [own] * len(body)
        return ids, written

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids after which the model writes the next answer."""
        return self.encode(messages)[0] + self.assistant
