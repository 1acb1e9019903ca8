//! Sums of usage by hour, key and model.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Hours of a day.
const DAY_HOURS: u64 = 24;
/// Hours that are kept apart; of older ones only their day is known.
const HOURS_KEPT: u64 = 35 * DAY_HOURS;

/// What was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Sums {
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) requests: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) refused: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) prompt_tokens: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) cached_tokens: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) completion_tokens: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) generation_ms: u64,
    /// Millijoules; 0 where no machine says what power it draws.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) energy_mj: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_zero(value: &u64) -> bool {
    *value == 0
}

impl Sums {
    /// Each of these after a change of each.
    pub(super) fn with(self, other: Self, change: fn(u64, u64) -> u64) -> Self {
        Self {
            requests: change(self.requests, other.requests),
            refused: change(self.refused, other.refused),
            prompt_tokens: change(self.prompt_tokens, other.prompt_tokens),
            cached_tokens: change(self.cached_tokens, other.cached_tokens),
            completion_tokens: change(self.completion_tokens, other.completion_tokens),
            generation_ms: change(self.generation_ms, other.generation_ms),
            energy_mj: change(self.energy_mj, other.energy_mj),
        }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        self.with(other, u64::saturating_add)
    }
}

/// Sums of an hour, of a key and a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Hours since 1970.
    pub(super) hour: u64,
    /// Absent: the request had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<String>,
    /// Absent: it got to no model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) model: Option<String>,
    pub(super) sums: Sums,
}

/// How long the times are that sums are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Period {
    Hour,
    Day,
    Total,
}

/// Sums of a period, of a key and a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UsageRow {
    /// When the period began, in seconds since 1970; absent: all of it.
    pub(crate) begin: Option<u64>,
    pub(crate) key: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) sums: Sums,
}

type Place = (u64, Option<String>, Option<String>);

/// As [`Place`], of a period; absent: all of it.
type RowPlace = (Option<u64>, Option<String>, Option<String>);

/// All sums.
#[derive(Debug, Default)]
pub(super) struct Book {
    sums: BTreeMap<Place, Sums>,
    newest: u64,
}

impl Book {
    pub(super) fn add(&mut self, entry: Entry) {
        let Entry { hour, key, model, sums } = entry;
        let is_new = hour > self.newest;
        let place = self.sums.entry((hour, key, model)).or_default();
        *place = place.plus(sums);
        if is_new {
            self.newest = hour;
            self.fold();
        }
    }

    /// Puts old hours together to days.
    fn fold(&mut self) {
        let oldest = self.newest.saturating_sub(HOURS_KEPT) / DAY_HOURS * DAY_HOURS;
        let is_old = |(hour, ..): &Place| *hour < oldest && !hour.is_multiple_of(DAY_HOURS);
        let old: Vec<Place> = self.sums.keys().filter(|place| is_old(place)).cloned().collect();
        for place in old {
            let Some(sums) = self.sums.remove(&place) else { continue };
            let (hour, key, model) = place;
            let day = self.sums.entry((hour / DAY_HOURS * DAY_HOURS, key, model)).or_default();
            *day = day.plus(sums);
        }
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        self.sums.iter().map(|((hour, key, model), sums)| Entry {
            hour: *hour,
            key: key.clone(),
            model: model.clone(),
            sums: *sums,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.sums.len()
    }

    pub(super) fn rows(
        &self,
        from: u64,
        to: u64,
        period: Period,
        only: Option<&str>,
    ) -> Vec<UsageRow> {
        let mut rows: BTreeMap<RowPlace, Sums> = BTreeMap::new();
        for ((hour, key, model), sums) in &self.sums {
            let at = hour * 3600;
            if at < from || at >= to || only.is_some_and(|only| key.as_deref() != Some(only)) {
                continue;
            }
            let begin = match period {
                Period::Hour => Some(at),
                Period::Day => Some(hour / DAY_HOURS * DAY_HOURS * 3600),
                Period::Total => None,
            };
            let row = rows.entry((begin, key.clone(), model.clone())).or_default();
            *row = row.plus(*sums);
        }
        rows.into_iter()
            .map(|((begin, key, model), sums)| UsageRow { begin, key, model, sums })
            .collect()
    }

    pub(super) fn by_key(&self) -> Vec<(Option<String>, Sums)> {
        let mut keys: BTreeMap<Option<String>, Sums> = BTreeMap::new();
        for ((_, key, _), sums) in &self.sums {
            let all = keys.entry(key.clone()).or_default();
            *all = all.plus(*sums);
        }
        keys.into_iter().collect()
    }
}
