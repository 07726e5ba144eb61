"""What of a version is open in llama.cpp: a model, or an adapter over a base that stays for the next version."""

from echo_node.backends.base import LoadRefused, PolicyFiles
from echo_node.backends.llama_context import LlamaAdapter, LlamaModel


class OpenFiles:
    """Opens and closes; no context may be left when `load` or `close` is called."""

    def __init__(self) -> None:
        self.model: LlamaModel | None = None
        self.adapter: LlamaAdapter | None = None
        self._base_digest = b""
        """Of the model below an adapter; empty when it is a whole version."""

    def load(self, policy: PolicyFiles, *, gpu_layers: int) -> None:
        """Close what was open and open a version. The base of an adapter stays, if it is the one that is open.

        Raises:
            LoadRefused: llama.cpp or the slots cannot serve it; call `close`.

        """
        if policy.base is None or policy.base_digest != self._base_digest:
            self.close()
        self._close_adapter()
        self.model = self.model or LlamaModel.open(policy.base or policy.artifact, gpu_layers=gpu_layers)
        self._base_digest = policy.base_digest
        _check(self.model, policy)
        if policy.base is not None:
            self.adapter = LlamaAdapter(self.model, policy.artifact)

    def close(self) -> None:
        """Give everything back."""
        self._close_adapter()
        self._base_digest = b""
        if self.model is not None:
            self.model.close()
            self.model = None

    def _close_adapter(self) -> None:
        if self.adapter is not None:
            self.adapter.close()
            self.adapter = None


def _check(model: LlamaModel, policy: PolicyFiles) -> None:
    """Refuse what the slots cannot serve: recurrent layers, windows and contexts shorter than the run's."""
    longest = policy.max_prompt_tokens + policy.max_completion_tokens
    if model.vocabulary < policy.vocabulary_size:
        raise LoadRefused(
            f"the run's vocabulary of {policy.vocabulary_size} is larger than the file's {model.vocabulary}"
        )
    if longest > model.trained_tokens:
        raise LoadRefused(f"the run allows {longest} tokens, the model's context is {model.trained_tokens}")
    if model.recurrent:
        raise LoadRefused("recurrent layers are not supported by the llama.cpp backend")
    if 0 < model.window < longest:
        raise LoadRefused(
            f"the model's sliding window of {model.window} is shorter than the run's context of {longest}"
        )
