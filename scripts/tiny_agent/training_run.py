"""A training run from its arguments (train.py): data, steps, reports, states on disk."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch

from scripts.tiny_agent.architecture import initial_weights, parsed, text_config
from scripts.tiny_agent.data import MAX_LENGTH, Batch, batches, held_out, load_tokenizer
from scripts.tiny_agent.options import Options
from scripts.tiny_agent.render import Rendered
from scripts.tiny_agent.teacher_forced import evaluate
from scripts.tiny_agent.trainer import Trainer
from scripts.tiny_agent.training_state import Progress, load_state, save_state

_REPORT_EVERY = 50


def train(
    trainer: Trainer,
    progress: Progress,
    stream: Iterator[Batch],
    arguments: argparse.Namespace,
    sessions: dict[str, list[Rendered]],
) -> None:
    """Steps until the plan or the time is at its end, with reports and evaluations on the way."""
    deadline = arguments.started + 60 * arguments.minutes if arguments.minutes else float("inf")
    waited, reported, tokens = 0.0, time.monotonic(), 0
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(next, stream)
        while progress.tokens < arguments.tokens and time.monotonic() < deadline:
            asked = time.monotonic()
            batch = coming.result()
            waited += time.monotonic() - asked
            coming = ahead.submit(next, stream)
            loss = trainer.step(
                batch.ids,
                batch.mask,
                batch.cu_seqlens,
                progress.tokens / arguments.tokens,
                progress.steps_since_fresh_moments,
            )
            progress.step += 1
            progress.steps_since_fresh_moments += 1
            progress.tokens += len(batch.ids)
            progress.next_example = batch.next_example
            tokens += len(batch.ids)
            if progress.step % _REPORT_EVERY == 0 or progress.steps_since_fresh_moments in (1, 10):
                _refuse_nan(loss.item(), progress.step)
                seconds = time.monotonic() - reported
                print(
                    f"{time.monotonic() - arguments.started:6.0f} s, step {progress.step}, "
                    f"{progress.tokens / 1e6:.0f} Mtok: {trainer.counts}; "
                    f"{tokens / seconds / 1e6:.3f} Mtok/s, {waited / seconds:.0%} waiting for data",
                    flush=True,
                )
                waited, reported, tokens = 0.0, time.monotonic(), 0
            if arguments.eval_every and progress.step % arguments.eval_every == 0:
                report(trainer, arguments, sessions)
                reported, tokens, waited = time.monotonic(), 0, 0.0
        coming.result()


def report(trainer: Trainer, arguments: argparse.Namespace, sessions: dict[str, list[Rendered]]) -> None:
    """Print how the rounded model does on held-out sessions."""
    model = trainer.rounded_model()
    for name, group in sessions.items():
        started = time.monotonic()
        results = evaluate(
            model, group, tokens_per_batch=arguments.tokens_per_batch, max_length=MAX_LENGTH, device=trainer.device
        )
        print(f"held out, {name} domains: {results}; {time.monotonic() - started:.1f} s", flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Train as the command line says."""
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    num_tokens = load_tokenizer(arguments.tokenizer).get_vocab_size(with_added_tokens=True)
    if arguments.resume:
        weights, moments, progress = load_state(arguments.resume)
        if progress.seed != arguments.seed:
            sys.exit(f"--seed: {arguments.seed} is not the state's, {progress.seed}")
    else:
        progress = Progress(arguments.seed, text_config(num_tokens))
        weights, moments = initial_weights(parsed(progress.text_config), arguments.seed), None
    options = Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)})
    stream = batches(
        arguments.seed,
        tokens_per_batch=arguments.tokens_per_batch,
        start_example=progress.next_example,
        num_workers=arguments.workers,
        directory=arguments.tokenizer,
    )
    trainer = Trainer(parsed(progress.text_config), weights, device, options)
    if moments is not None:
        trainer.optimizer.load_state(moments)
    count = sum(weight.numel() for weight in weights.values())
    print(
        f"{count / 1e6:.2f} M parameters, {arguments.tokens / 1e6:.0f} Mtok planned, {progress.tokens / 1e6:.0f} "
        f"Mtok seen",
        flush=True,
    )
    sessions = {
        name: held_out(arguments.seed, arguments.eval_sessions, unseen, directory=arguments.tokenizer)
        for name, unseen in (("known", False), ("unseen", True))
        if arguments.eval_sessions
    }
    with closing(stream):
        train(trainer, progress, stream, arguments, sessions)
        save_state(arguments.out, trainer.weights, trainer.optimizer.state(), progress)
        if arguments.transport:
            save_state(arguments.transport, trainer.weights, None, progress)
        print(
            f"{time.monotonic() - arguments.started:6.0f} s: saved {arguments.out} after step {progress.step}",
            flush=True,
        )
        report(trainer, arguments, sessions)


def _refuse_nan(loss: float, step: int) -> None:
    if loss != loss:
        sys.exit(f"the loss is NaN at step {step}")
