//! Metrics in Prometheus' format. vLLM's names stand beside our own, since
//! dashboards, load generators and gateways ask for them; both show the same numbers.

mod drafts;
mod front;
mod ranks;

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use shardpack_chat::conversation::EndReason;
use shardpack_engine_api::{EngineState, EngineStatus};

use super::usage::AnswerUsage;
use drafts::DraftCounters;
pub(super) use front::{FrontMetrics, merged};
use ranks::RankGauges;

/// Seconds, from a token's to a long answer's.
const LATENCIES: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
];
/// Tokens of prompts and answers.
const COUNTS: [f64; 14] = [
    1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0, 65_536.0,
    262_144.0,
];
/// Over which the page's tokens per second are taken.
const RATE_WINDOW: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Finished {
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Adjusted {
    change: &'static str,
}

/// Counters of one model.
pub(super) struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    success: Family<Finished, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generation_tokens: Counter,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    prompt_lengths: Histogram,
    answer_lengths: Histogram,
    ignored: Counter,
    adjusted: Family<Adjusted, Counter>,
    adjusted_requests: Counter,
    unenforced: Counter,
    calls: Counter,
    up: Gauge,
    ranks: Gauge,
    engine_requests: Gauge,
    by_rank: RankGauges,
    drafts: DraftCounters,
    rate: Mutex<Rate>,
}

/// Tokens of the last seconds.
struct Rate {
    since: Instant,
    tokens: u64,
    last: f64,
}

/// A registry's metrics as text.
fn encoded(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).expect("strings take everything");
    text
}

/// Registers a metric under our own name and, where there is one, vLLM's.
macro_rules! register {
    ($registry:expr, $metric:expr, $own:literal, $vllm:literal, $help:literal) => {{
        let metric = $metric;
        $registry.register(concat!("shardpack_", $own), $help, metric.clone());
        $registry.register(concat!("vllm:", $vllm), $help, metric.clone());
        metric
    }};
    ($registry:expr, $metric:expr, $own:literal, $help:literal) => {{
        let metric = $metric;
        $registry.register(concat!("shardpack_", $own), $help, metric.clone());
        metric
    }};
}

impl Metrics {
    /// Everything at zero.
    #[expect(clippy::too_many_lines, reason = "a list, one metric an entry")]
    pub(super) fn new(model: &str) -> Self {
        let mut registry = Registry::default();
        let label = ("model_name".into(), model.to_owned().into());
        let r = registry.sub_registry_with_label(label);
        let seconds = || Histogram::new(LATENCIES);
        let lengths = || Histogram::new(COUNTS);
        let gauge = Gauge::default;
        let running = register!(
            r,
            gauge(),
            "requests_running",
            "num_requests_running",
            "Requests that are generating tokens"
        );
        let waiting = register!(
            r,
            gauge(),
            "requests_waiting",
            "num_requests_waiting",
            "Requests waiting for their first token"
        );
        let success = register!(
            r,
            Family::default(),
            "requests",
            "request_success",
            "Finished completions, by reason"
        );
        let prompt_tokens =
            register!(r, Counter::default(), "prompt_tokens", "prompt_tokens", "Prompt tokens");
        let cached_tokens = register!(
            r,
            Counter::default(),
            "cached_prompt_tokens",
            "prefix_cache_hits",
            "Prompt tokens found in the prefix cache"
        );
        let generation_tokens = register!(
            r,
            Counter::default(),
            "generation_tokens",
            "generation_tokens",
            "Generated tokens"
        );
        let first_token = register!(
            r,
            seconds(),
            "time_to_first_token_seconds",
            "time_to_first_token_seconds",
            "Time from submission to the first token"
        );
        let between_tokens = register!(
            r,
            seconds(),
            "inter_token_latency_seconds",
            "inter_token_latency_seconds",
            "Time between two tokens of a completion"
        );
        let whole = register!(
            r,
            seconds(),
            "request_seconds",
            "e2e_request_latency_seconds",
            "Time from submission to the end"
        );
        let prompt_lengths = register!(
            r,
            lengths(),
            "request_prompt_tokens",
            "request_prompt_tokens",
            "Prompt length in tokens"
        );
        let answer_lengths = register!(
            r,
            lengths(),
            "request_generation_tokens",
            "request_generation_tokens",
            "Completion length in tokens"
        );
        let ignored =
            register!(r, Counter::default(), "ignored_parameters", "Ignored request parameters");
        let adjusted = register!(
            r,
            Family::default(),
            "conversation_adjustments",
            "Changes of conversations that the chat template refuses as they came"
        );
        let adjusted_requests = register!(
            r,
            Counter::default(),
            "adjusted_requests",
            "Requests whose conversation was changed for the chat template"
        );
        let unenforced = register!(
            r,
            Counter::default(),
            "unenforced_schemas",
            "Requests with a tool schema that is not enforced in every place"
        );
        let calls = register!(r, Counter::default(), "tool_calls", "Complete tool calls");
        let up = register!(r, gauge(), "engine_ready", "1 while the engine accepts requests");
        let ranks = register!(r, gauge(), "ranks", "Ranks of the rank group");
        let engine_requests = register!(r, gauge(), "engine_requests", "Requests in the engine");
        let by_rank = RankGauges::new(r);
        let drafts = DraftCounters::new(r);
        let rate = Mutex::new(Rate { since: Instant::now(), tokens: 0, last: 0.0 });
        Self {
            registry,
            running,
            waiting,
            success,
            prompt_tokens,
            cached_tokens,
            generation_tokens,
            first_token,
            between_tokens,
            whole,
            prompt_lengths,
            answer_lengths,
            ignored,
            adjusted,
            adjusted_requests,
            unenforced,
            calls,
            up,
            ranks,
            engine_requests,
            by_rank,
            drafts,
            rate,
        }
    }

    /// The text that Prometheus reads; a model that is not loaded has no engine.
    pub(super) fn text(&self, engine: Option<&EngineStatus>) -> String {
        let is_ready = engine.is_some_and(|engine| engine.state == EngineState::Ready);
        self.up.set(i64::from(is_ready));
        self.ranks.set(engine.map_or(0, |engine| i64::from(engine.ranks)));
        self.engine_requests.set(engine.map_or(0, |engine| i64::from(engine.active_requests)));
        match engine {
            Some(engine) => {
                self.by_rank.set(engine);
                self.drafts.set(engine);
            }
            None => self.by_rank.clear(),
        }
        encoded(&self.registry)
    }

    /// A conversation was changed so that the chat template renders it.
    pub(super) fn adjusted(&self, names: &[&'static str]) {
        self.adjusted_requests.inc();
        for change in names {
            self.adjusted.get_or_create(&Adjusted { change }).inc();
        }
    }

    /// How many were.
    pub(super) fn adjusted_requests(&self) -> u64 {
        self.adjusted_requests.get()
    }

    /// A schema is not enforced in every place.
    pub(super) fn unenforced(&self) {
        self.unenforced.inc();
    }

    /// How many requests had one.
    pub(super) fn unenforced_requests(&self) -> u64 {
        self.unenforced.get()
    }

    /// Parameters were ignored.
    pub(super) fn ignored(&self, count: usize) {
        self.ignored.inc_by(count as u64);
    }

    /// Tokens of prompts, and of these those found in the prefix cache.
    pub(super) fn prompt_tokens(&self) -> [u64; 2] {
        [self.prompt_tokens.get(), self.cached_tokens.get()]
    }

    /// Recent tokens per second over all requests.
    pub(super) fn tokens_per_second(&self) -> f64 {
        self.count_rate(0)
    }

    /// Requests without and with a first token.
    pub(super) fn queue(&self) -> (i64, i64) {
        (self.waiting.get(), self.running.get())
    }

    fn count_rate(&self, tokens: u64) -> f64 {
        let mut rate = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        rate.tokens += tokens;
        let elapsed = rate.since.elapsed();
        if elapsed >= RATE_WINDOW {
            rate.last = rate.tokens as f64 / elapsed.as_secs_f64();
            (rate.tokens, rate.since) = (0, Instant::now());
        } else if elapsed >= RATE_WINDOW / 5 && rate.last == 0.0 {
            return rate.tokens as f64 / elapsed.as_secs_f64();
        }
        rate.last
    }
}

/// One answer's clock; it counts as waiting, then as running, until it is dropped.
pub(super) struct AnswerClock {
    metrics: std::sync::Arc<Metrics>,
    begun: Instant,
    last_token: Option<Instant>,
}

impl AnswerClock {
    /// Starts with the submission.
    pub(super) fn start(metrics: std::sync::Arc<Metrics>) -> Self {
        metrics.waiting.inc();
        Self { metrics, begun: Instant::now(), last_token: None }
    }

    /// A token has come.
    pub(super) fn token(&mut self) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => {
                self.metrics.waiting.dec();
                self.metrics.running.inc();
                self.metrics.first_token.observe((now - self.begun).as_secs_f64());
            }
            Some(last) => self.metrics.between_tokens.observe((now - last).as_secs_f64()),
        }
        self.metrics.generation_tokens.inc();
        self.metrics.count_rate(1);
    }

    /// The answer is complete.
    pub(super) fn finished(&mut self, reason: EndReason, usage: AnswerUsage, calls: u32) {
        let metrics = &self.metrics;
        let finished_reason = match reason {
            EndReason::Stop | EndReason::StopText(_) => "stop",
            EndReason::Length => "length",
            EndReason::ToolCalls => "tool_calls",
        };
        metrics.success.get_or_create(&Finished { finished_reason }).inc();
        metrics.whole.observe(self.begun.elapsed().as_secs_f64());
        metrics.prompt_tokens.inc_by(u64::from(usage.prompt_tokens));
        metrics.cached_tokens.inc_by(u64::from(usage.cached_tokens));
        metrics.prompt_lengths.observe(f64::from(usage.prompt_tokens));
        metrics.answer_lengths.observe(f64::from(usage.completion_tokens));
        metrics.calls.inc_by(u64::from(calls));
    }
}

impl Drop for AnswerClock {
    fn drop(&mut self) {
        match self.last_token {
            None => self.metrics.waiting.dec(),
            Some(_) => self.metrics.running.dec(),
        };
    }
}
