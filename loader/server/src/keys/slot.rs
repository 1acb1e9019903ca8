//! A known key: what it may do, what it has spent of its limits, and the slots of its running requests.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};
use shardpack_engine_api::Tenant;

use super::{Access, KeyEntry, KeyLimits, Scope};
use crate::{
    error::{ApiError, ErrorKind},
    tenant,
};

/// A known key and its usage.
#[derive(Debug)]
pub(crate) struct Key {
    pub(super) hash: blake3::Hash,
    pub(super) entry: KeyEntry,
    /// Also of the same key as it was before its file was read again.
    pub(super) spent: Arc<Mutex<Spent>>,
}

/// What a key has a minute's worth of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Requests,
    Tokens,
    BodyBytes,
    GrammarMs,
}

impl Limit {
    const ALL: [Self; 4] = [Self::Requests, Self::Tokens, Self::BodyBytes, Self::GrammarMs];

    /// How much of it a minute has; absent: no limit.
    fn of(self, limits: &KeyLimits) -> Option<f64> {
        match self {
            Self::Requests => limits.requests_per_minute.map(f64::from),
            Self::Tokens => limits.tokens_per_minute.map(f64::from),
            Self::BodyBytes => limits.body_bytes_per_minute.map(|bytes| bytes as f64),
            Self::GrammarMs => limits.grammar_ms_per_minute.map(f64::from),
        }
        .map(|most| most.max(1.0))
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
            Self::BodyBytes => "bytes of request bodies",
            Self::GrammarMs => "milliseconds of compiling grammars",
        }
    }

    /// Its name in statistics.
    const fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
            Self::BodyBytes => "body_bytes",
            Self::GrammarMs => "grammar_ms",
        }
    }
}

/// Token buckets that refill evenly and hold a minute's worth at most. Those whose cost is known only
/// afterwards (tokens, grammars) may be overdrawn.
#[derive(Debug)]
pub(super) struct Spent {
    at: Instant,
    /// Minutes' worth that is left of each limit, 1 when full.
    left: [f64; 4],
    running: u32,
}

impl Spent {
    pub(super) const fn new(at: Instant) -> Self {
        Self { at, left: [1.0; 4], running: 0 }
    }

    fn refill(&mut self, now: Instant) {
        let minutes = now.saturating_duration_since(self.at).as_secs_f64() / 60.0;
        self.at = self.at.max(now);
        for left in &mut self.left {
            *left = (*left + minutes).min(1.0);
        }
    }
}

impl Key {
    /// Refuses what needs a scope that this key lacks.
    pub(crate) fn demand(&self, scope: Scope) -> Result<(), ApiError> {
        if self.has(scope) {
            return Ok(());
        }
        let own: Vec<&str> = self.entry.scopes.iter().map(|scope| scope.name()).collect();
        let message = format!(
            "the API key {:?} lacks the scope {}: it has {}",
            self.entry.name,
            scope.name(),
            if own.is_empty() { "none".to_owned() } else { own.join(", ") },
        );
        Err(ApiError::new(ErrorKind::Forbidden, message).with_code("missing_scope"))
    }

    /// Refuses what this key has no access to.
    pub(super) fn demand_access(&self, access: Access) -> Result<(), ApiError> {
        match access {
            Access::Scope(scope) => self.demand(scope),
            Access::Watch if self.entry.scopes.is_empty() => self.demand(Scope::Metrics),
            Access::Public | Access::Watch => Ok(()),
        }
    }

    /// Whether it is told of the server's own state, beside that of its models.
    pub(crate) fn sees_server(&self) -> bool {
        self.has(Scope::Admin) || self.has(Scope::Metrics)
    }

    /// Whether it has a scope.
    pub(crate) fn has(&self, scope: Scope) -> bool {
        self.entry.scopes.contains(&scope)
    }

    /// Whose it is.
    pub(crate) fn name(&self) -> &str {
        &self.entry.name
    }

    /// Whether it may use a model that has these names.
    pub(crate) fn may_use(&self, names: &[String]) -> bool {
        let models = self.entry.models.as_ref();
        models.is_none_or(|models| names.iter().any(|name| models.contains(name)))
    }

    /// Whether there are models that it may not use.
    pub(crate) fn is_restricted(&self) -> bool {
        self.entry.models.is_some()
    }

    /// Its share of a busy server.
    pub(crate) fn weight(&self) -> u32 {
        self.entry.weight.map_or(1, std::num::NonZeroU32::get)
    }

    /// As whose requests its requests count where several share the engine, and whose prefixes they find
    /// in the cache: those of all keys of a group, and else its own. It does not change when the key is
    /// replaced under its name.
    pub(crate) fn tenant(&self) -> Tenant {
        let group = self.entry.share_prefix_cache.as_deref();
        tenant::of_key(&self.entry.name, self.weight(), group)
    }

    fn spent(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for a request, or returns the rate-limit error with the time to wait.
    pub(crate) fn begin(self: &Arc<Self>, now: Instant) -> Result<KeySlot, ApiError> {
        let limits = &self.entry.limits;
        let mut spent = self.spent();
        spent.refill(now);
        if let Some(most) = limits.concurrency.filter(|&most| spent.running >= most) {
            return Err(limited(&format!("{most} requests at once"), None));
        }
        take(&mut spent, limits, Limit::Requests, 1.0)?;
        for limit in [Limit::Tokens, Limit::BodyBytes] {
            check(&spent, limits, limit)?;
        }
        spent.running += 1;
        Ok(KeySlot(self.clone()))
    }

    /// What is left of its limits, for statistics.
    pub(crate) fn stats(&self, now: Instant) -> Value {
        let limits = &self.entry.limits;
        let mut spent = self.spent();
        spent.refill(now);
        let (mut most, mut left) = (Map::new(), Map::new());
        for limit in Limit::ALL {
            if let Some(minute) = limit.of(limits) {
                most.insert(format!("{}_per_minute", limit.name()), (minute as u64).into());
                let rest = (spent.left[limit as usize] * minute + 1e-6).floor();
                left.insert(limit.name().to_owned(), (rest as i64).into());
            }
        }
        if let Some(at_once) = limits.concurrency {
            most.insert("concurrency".to_owned(), at_once.into());
            left.insert("concurrency".to_owned(), at_once.saturating_sub(spent.running).into());
        }
        json!({
            "name": self.name(), "running": spent.running, "weight": self.weight(),
            "models": self.entry.models, "limits": most, "left": left,
        })
    }

    /// Charges time that compiling a grammar took.
    fn spend_grammar(&self, time: Duration) {
        if let Some(minute) = Limit::GrammarMs.of(&self.entry.limits) {
            self.spent().left[Limit::GrammarMs as usize] -= time.as_secs_f64() * 1000.0 / minute;
        }
    }
}

/// Takes so much of a limit, if that is left.
fn take(spent: &mut Spent, limits: &KeyLimits, limit: Limit, cost: f64) -> Result<(), ApiError> {
    let Some(minute) = limit.of(limits) else { return Ok(()) };
    let (left, part) = (&mut spent.left[limit as usize], cost / minute);
    // Rounding must not cost anybody a request.
    if *left + 1e-9 < part {
        let wait = (part - *left) * 60_000.0;
        return Err(limited(&format!("{minute:.0} {} a minute", limit.unit()), Some(wait)));
    }
    *left -= part;
    Ok(())
}

/// Refuses who has overdrawn a limit.
fn check(spent: &Spent, limits: &KeyLimits, limit: Limit) -> Result<(), ApiError> {
    let Some(minute) = limit.of(limits) else { return Ok(()) };
    let left = spent.left[limit as usize];
    if left > 0.0 {
        return Ok(());
    }
    let wait = -left * 60_000.0 + 1.0;
    Err(limited(&format!("{minute:.0} {} a minute", limit.unit()), Some(wait)))
}

fn limited(limit: &str, wait_ms: Option<f64>) -> ApiError {
    let wait_ms = wait_ms.map_or(1000, |wait| wait.ceil().clamp(1.0, 3_600_000.0) as u64);
    let seconds = wait_ms as f64 / 1000.0;
    // Clients read the time out of the sentence.
    let message = format!(
        "rate limit of {limit} reached for this API key: please try again in {seconds:.3}s"
    );
    let error = ApiError::new(ErrorKind::RateLimited, message).with_code("rate_limit_exceeded");
    ApiError { retry_after_ms: Some(wait_ms), ..error }
}

/// A running request of a key.
#[derive(Debug)]
pub(crate) struct KeySlot(Arc<Key>);

impl KeySlot {
    /// Counts tokens.
    pub(crate) fn spend(&self, tokens: u32) {
        if let Some(minute) = Limit::Tokens.of(&self.0.entry.limits) {
            self.0.spent().left[Limit::Tokens as usize] -= f64::from(tokens) / minute;
        }
    }

    /// Charges bytes of a request's body before they are worked on, or refuses them.
    pub(crate) fn spend_bytes(&self, bytes: u64) -> Result<(), ApiError> {
        self.spend_bytes_at(bytes, Instant::now())
    }

    pub(super) fn spend_bytes_at(&self, bytes: u64, now: Instant) -> Result<(), ApiError> {
        let limits = &self.0.entry.limits;
        if let Some(most) = limits.body_bytes_per_minute.filter(|&most| bytes > most) {
            let message = format!(
                "the body has {bytes} bytes, and this API key may send {most} bytes of request \
                 bodies a minute: send a shorter one"
            );
            return Err(ApiError::new(ErrorKind::TooLarge, message).with_code("body_over_limit"));
        }
        let mut spent = self.0.spent();
        spent.refill(now);
        take(&mut spent, limits, Limit::BodyBytes, bytes as f64)
    }

    /// Refuses a grammar where earlier ones have taken all time that the key has for them.
    pub(crate) fn check_grammar(&self) -> Result<(), ApiError> {
        let mut spent = self.0.spent();
        spent.refill(Instant::now());
        check(&spent, &self.0.entry.limits, Limit::GrammarMs)
    }

    /// Charges time that compiling a grammar took.
    pub(crate) fn spend_grammar(&self, time: Duration) {
        self.0.spend_grammar(time);
    }
}

impl Drop for KeySlot {
    fn drop(&mut self) {
        let mut spent = self.0.spent();
        spent.running = spent.running.saturating_sub(1);
    }
}
