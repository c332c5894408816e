"""What `trace` does once it needs torch: load, answer prompts, and record what they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hotexperts
from hotexperts.cli.generate import Sampling, Session
from hotexperts.cli.opened import open_model
from hotexperts.cli.options import model_label
from hotexperts.errors import ConfigError, HotExpertsError
from hotexperts.integrations.transformers.recording import Recorded, RoutingRecorder


@dataclass(frozen=True, slots=True)
class Recording:
    """A cached model that is about to be recorded.

    Attributes:
        path: of the model.
        model: with an `expert_cache`.
        session: answers prompts with it.
        max_new_tokens: of each answer.
    """

    path: str
    model: Any
    session: Session
    max_new_tokens: int

    @classmethod
    def open(cls, path: str, *, max_new_tokens: int, chat: bool | None, **how: Any) -> Recording:
        """Load the model.

        Args:
            path: of the model.
            max_new_tokens: of each answer.
            chat: as for `Sampling`.
            **how: more for `open_model`.

        Raises:
            HotExpertsError: see `open_model`; or no chat template where one is asked for.
        """
        opened = open_model(path, **how)
        session = Session(opened, Sampling(max_new_tokens, 0.0, chat))
        return cls(path, opened.model, session, max_new_tokens)

    @property
    def num_experts(self) -> int:
        """Experts of the layer that has most."""
        return max(int(p.store.num_experts) for p in self.model.expert_cache.providers)

    def meta(self, licence: str) -> dict[str, Any]:
        """What the file says about itself; `expert_nbytes` is that of the largest expert."""
        providers = self.model.expert_cache.providers
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {
            "model": model_label(self.path),
            "expert_nbytes": max(p.store.layout.nbytes for p in providers),
            "source": f"hotexperts {hotexperts.__version__}: each prompt and up to "
            f"{self.max_new_tokens} likeliest tokens after it, in {dtype}",
            "licence": licence,
        }

    def pieces(
        self, prompts: list[tuple[str, str]], *, with_logits: bool, with_guesses: bool
    ) -> Iterator[Recorded]:
        """What each prompt and its answer ask for; of one that Ctrl-C breaks off, what came.

        No prompt is answered before all are known to fit.

        Args:
            prompts: where each stands, for errors, and its text.
            with_logits: record the routers' logits as well.
            with_guesses: record guesses of each next layer's demand as well.

        Raises:
            ConfigError: a prompt that cannot be answered; its place is named.
            UnsupportedModelError: routing of a form that cannot be recorded.
        """
        for place, text in prompts:
            with _named(place):
                self.session.check(text)
        recorder = RoutingRecorder(self.model, with_logits=with_logits, with_guesses=with_guesses)
        with recorder:
            for place, text in prompts:
                try:
                    with _named(place):
                        self.session.answer(text, emit=lambda text: None)
                except KeyboardInterrupt:
                    if found := recorder.take():
                        yield found
                    raise
                if found := recorder.take():
                    yield found


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Errors inside say which prompt they are of."""
    try:
        yield
    except HotExpertsError as error:
        raise ConfigError(f"{place}: {error}") from error
