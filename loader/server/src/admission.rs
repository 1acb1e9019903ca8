//! Which models fit into memory together, and which must leave for another: numbers alone.

use std::{collections::BTreeMap, fmt::Write as _, time::Instant};

use super::model_host::{Machine, MemoryShare, ModelEntry};

/// A model that is in memory, or on its way there.
#[derive(Clone, Debug)]
pub(super) struct Resident {
    pub(super) name: String,
    pub(super) memory: Vec<MemoryShare>,
    pub(super) stay: Stay,
}

/// Whether a model may leave memory for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stay {
    /// It may; what was used longer ago and is idle leaves first.
    MayLeave { is_busy: bool, last_used: Instant },
    /// Not now: it is being loaded or unloaded, or requests are about to run.
    Soon,
    /// Never: it is pinned.
    Pinned,
}

/// What must happen before a model is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Nothing: there is room.
    Fits,
    /// These leave, in this order.
    After(Vec<String>),
    /// Something is in motion that makes room, or may.
    Later,
}

/// Why a model cannot be loaded, in a sentence with numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NoRoom(String);

/// Decides how `name` with `memory` comes into memory beside `residents`.
pub(super) fn admit(
    name: &str,
    memory: &[MemoryShare],
    machines: &[Machine],
    residents: &[Resident],
) -> Result<Admission, NoRoom> {
    let fits = |staying: &[&Resident]| {
        machines.iter().all(|machine| {
            taken(machine, staying).saturating_add(needs(machine, memory)) <= machine.limit_bytes
        })
    };
    let all: Vec<&Resident> = residents.iter().collect();
    if fits(&all) {
        return Ok(Admission::Fits);
    }
    let mut leaving: Vec<(bool, Instant, &str)> = residents
        .iter()
        .filter_map(|resident| match resident.stay {
            Stay::MayLeave { is_busy, last_used } => {
                Some((is_busy, last_used, resident.name.as_str()))
            }
            Stay::Soon | Stay::Pinned => None,
        })
        // One that has nothing where memory is short frees nothing.
        .collect();
    leaving.sort_unstable();
    let mut gone: Vec<&str> = Vec::new();
    for (_, _, candidate) in &leaving {
        gone.push(candidate);
        let staying: Vec<&Resident> =
            residents.iter().filter(|it| !gone.contains(&it.name.as_str())).collect();
        if fits(&staying) {
            return Ok(Admission::After(needed(&gone, residents, &fits)));
        }
    }
    let pinned: Vec<&Resident> = residents.iter().filter(|it| it.stay == Stay::Pinned).collect();
    if fits(&pinned) {
        return Ok(Admission::Later);
    }
    Err(NoRoom(refusal(name, memory, machines, &pinned)))
}

/// Checks that models fit into memory together, none of them leaving for another.
pub fn check_room(models: &[ModelEntry], machines: &[Machine]) -> Result<(), NoRoom> {
    let mut residents = Vec::new();
    for model in models {
        let (name, memory) = (model.card.name(), &model.memory);
        admit(name, memory, machines, &residents)?;
        let (name, memory) = (name.to_owned(), memory.clone());
        residents.push(Resident { name, memory, stay: Stay::Pinned });
    }
    Ok(())
}

/// Of those that would leave, the ones without which it does not fit.
fn needed(
    gone: &[&str],
    residents: &[Resident],
    fits: &impl Fn(&[&Resident]) -> bool,
) -> Vec<String> {
    let mut kept = gone.to_vec();
    // The most recently used are spared first.
    for name in gone.iter().rev() {
        let fewer: Vec<&str> = kept.iter().copied().filter(|it| it != name).collect();
        let staying: Vec<&Resident> =
            residents.iter().filter(|it| !fewer.contains(&it.name.as_str())).collect();
        if fits(&staying) {
            kept = fewer;
        }
    }
    kept.into_iter().map(str::to_owned).collect()
}

fn needs(machine: &Machine, memory: &[MemoryShare]) -> u64 {
    let here = memory.iter().filter(|share| share.machine == machine.name);
    here.map(MemoryShare::total_bytes).fold(0, u64::saturating_add)
}

fn taken(machine: &Machine, residents: &[&Resident]) -> u64 {
    let each = residents.iter().map(|resident| needs(machine, &resident.memory));
    each.fold(0, u64::saturating_add)
}

fn refusal(
    name: &str,
    memory: &[MemoryShare],
    machines: &[Machine],
    pinned: &[&Resident],
) -> String {
    let short = machines.iter().find(|machine| {
        taken(machine, pinned).saturating_add(needs(machine, memory)) > machine.limit_bytes
    });
    let Some(machine) = short else { return format!("model '{name}' does not fit into memory") };
    let sum = |of: fn(&MemoryShare) -> u64| {
        let here = memory.iter().filter(|share| share.machine == machine.name);
        size(here.map(of).fold(0, u64::saturating_add))
    };
    let mut text = format!(
        "model '{name}' needs {} on {} (weights {}, KV cache {}, working memory {}), and {} of {} \
         can be had",
        size(needs(machine, memory)),
        machine.name,
        sum(|share| share.weights_bytes),
        sum(|share| share.cache_bytes),
        sum(|share| share.working_bytes),
        size(machine.limit_bytes.saturating_sub(taken(machine, pinned))),
        size(machine.limit_bytes),
    );
    let held: BTreeMap<&str, u64> = pinned
        .iter()
        .map(|resident| (resident.name.as_str(), needs(machine, &resident.memory)))
        .filter(|(_, bytes)| *bytes > 0)
        .collect();
    for (index, (name, bytes)) in held.iter().enumerate() {
        let before = if index == 0 { ": the rest is held by" } else { "," };
        // Writing to a string cannot fail.
        let _ = write!(text, "{before} '{name}' ({})", size(*bytes));
    }
    text.push_str("; give more with --memory, a smaller --kv-memory, or fewer bits");
    text
}

/// Bytes as people read them.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.iter().find(|(_, shift)| bytes >> shift > 0) {
        // Exact enough for three digits.
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / f64::from(*shift).exp2()),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::LazyLock, time::Duration};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn share(machine: &str, gib: u64) -> MemoryShare {
        let weights_bytes = gib * GIB;
        MemoryShare { machine: machine.to_owned(), weights_bytes, cache_bytes: 0, working_bytes: 0 }
    }

    fn machine(name: &str, gib: u64) -> Machine {
        Machine { name: name.to_owned(), limit_bytes: gib * GIB }
    }

    fn resident(name: &str, memory: &[MemoryShare], stay: Stay) -> Resident {
        Resident { name: name.to_owned(), memory: memory.to_vec(), stay }
    }

    fn idle(at_seconds: u64) -> Stay {
        Stay::MayLeave { is_busy: false, last_used: moment(at_seconds) }
    }

    fn busy(at_seconds: u64) -> Stay {
        Stay::MayLeave { is_busy: true, last_used: moment(at_seconds) }
    }

    fn moment(at_seconds: u64) -> Instant {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        *START + Duration::from_secs(at_seconds)
    }

    fn on_a(gib: u64) -> Vec<MemoryShare> {
        vec![share("a", gib)]
    }

    fn after(names: &[&str]) -> Admission {
        Admission::After(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn idle_models_leave_in_the_order_of_their_last_use() {
        let check = |gib: u64, stays: [Stay; 3], expected: Admission| {
            let [x, y, z] = stays;
            let residents = [
                resident("x", &on_a(2), x),
                resident("y", &on_a(3), y),
                resident("z", &on_a(4), z),
            ];
            let found = admit("new", &on_a(gib), &[machine("a", 10)], &residents);
            assert_eq!(found, Ok(expected), "{gib} {residents:?}");
        };
        check(1, [idle(1), idle(2), idle(3)], Admission::Fits);
        check(3, [idle(1), idle(2), idle(3)], after(&["x"]));
        check(3, [idle(3), idle(2), idle(1)], after(&["z"]));
        check(5, [idle(1), idle(2), idle(3)], after(&["x", "y"]));
        // Busy ones leave only where idle ones do not suffice.
        check(3, [busy(1), idle(2), idle(3)], after(&["y"]));
        check(10, [busy(1), idle(3), idle(2)], after(&["z", "y", "x"]));
        // The oldest is spared where it is not needed.
        check(4, [idle(1), idle(2), Stay::Pinned], after(&["y"]));
        // What is in motion is waited for.
        check(9, [Stay::Soon, idle(2), idle(3)], Admission::Later);
    }

    #[test]
    fn models_that_free_nothing_where_it_is_short_stay() {
        let machines = [machine("a", 10), machine("b", 10)];
        let residents = [
            resident("on-b", &[share("b", 9)], idle(1)),
            resident("on-a", &[share("a", 9)], idle(2)),
        ];
        let found = admit("new", &[share("a", 5)], &machines, &residents);
        assert_eq!(found, Ok(after(&["on-a"])));
    }

    #[test]
    fn refusals_have_the_numbers() {
        let residents =
            [resident("pinned", &on_a(7), Stay::Pinned), resident("idle", &on_a(1), idle(1))];
        let memory = MemoryShare { cache_bytes: GIB / 2, working_bytes: 64 << 20, ..share("a", 3) };
        let error = admit("new", &[memory], &[machine("a", 10)], &residents).unwrap_err();
        let text = error.to_string();
        for part in [
            "'new' needs 3.6 GiB on a",
            "weights 3.0 GiB",
            "KV cache 512.0 MiB",
            "working memory 64.0 MiB",
            "3.0 GiB of 10.0 GiB can be had",
            "'pinned' (7.0 GiB)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
