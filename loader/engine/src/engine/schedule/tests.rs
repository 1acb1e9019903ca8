//! Tenants that share a schedule: by steps, and by a clock that the tests set.

use std::{
    collections::BTreeMap,
    sync::{Mutex, mpsc},
};

use shardpack_engine_api::{
    Constraint, ConstraintError, ConstraintSource, Tenant, TokenId, TokenMask,
};

use super::*;
use crate::engine::{
    runner::{SampledSequence, StepResults},
    sample::SampledToken,
};

/// For threads; only a failing test waits that long.
const SOON: Duration = Duration::from_mins(10);

/// A schedule whose steps are computed by nobody, on a clock of its own.
struct Steps {
    schedule: Schedule,
    now: Instant,
    step: u64,
    /// How long a step takes, by its prompt tokens and its streams.
    cost: fn(usize, usize) -> Duration,
}

/// What a step had of each request.
type Seen = Vec<(u64, usize)>;

impl Steps {
    fn new(max_sequences: usize, pages: u64) -> Self {
        let limits = Limits {
            vocab_size: 64,
            max_positions: 1 << 16,
            shortened: None,
            max_sequences,
            max_waiting: 1024,
            prefill_tokens: 512,
            chunked_prefill_tokens: 64,
            kept_percent: 88,
            prefix_reuse: true,
            whole_prompts: false,
            long_beyond: Vec::new(),
            drafting: Drafting::Off,
        };
        let mut schedule = Schedule::new(limits);
        let can_roll_back = false;
        schedule.begin_anew(Agreed { can_roll_back, pages, prefill_tokens: 512 });
        Self { schedule, now: Instant::now(), step: 0, cost: |_, _| Duration::from_millis(1) }
    }

    fn submit(&mut self, id: u64, tenant: Tenant, prompt: usize, max_tokens: u32) {
        self.submit_with(id, tenant, prompt, max_tokens, None);
    }

    fn submit_with(
        &mut self,
        id: u64,
        tenant: Tenant,
        prompt: usize,
        max_tokens: u32,
        constraint: Option<&str>,
    ) {
        // No prompt begins like another one.
        let prompt = (0..prompt).map(|index| TokenId((id as u32 * 7 + index as u32) % 64));
        let constraint = constraint.map(|text| ConstraintSource(text.to_owned()));
        let request = GenerateRequest {
            tenant,
            constraint,
            ..GenerateRequest::greedy(prompt.collect(), max_tokens)
        };
        self.schedule.submit(RequestId(id), request, self.now);
    }

    /// The next step, and how long it took.
    fn next(&mut self) -> (Seen, Duration) {
        self.step += 1;
        let plan = self.schedule.plan(self.step, self.now, None).unwrap();
        let seen: Seen = plan.scheduled.iter().map(|it| (it.id.0, it.tokens.len())).collect();
        let streams = plan.scheduled.iter().filter(|it| it.tokens.len() == 1).count();
        let prompt: usize = seen.iter().map(|it| it.1).sum::<usize>() - streams;
        let took = (self.cost)(prompt, streams);
        self.now += took;
        self.schedule.step_took(took);
        let token = |id| SampledSequence {
            id,
            tokens: vec![SampledToken { token: Some(9), logprobs: None }],
        };
        let sampled = plan.scheduled.iter().filter(|it| it.sample).map(|it| token(it.id));
        let results = StepResults { sampled: sampled.collect(), prompts: Vec::new() };
        self.schedule.record(&plan, results, self.now);
        (seen, took)
    }

    /// Steps until the requests are over; in which one each ended.
    fn ends(&mut self) -> BTreeMap<u64, u64> {
        let mut ends = BTreeMap::new();
        for _ in 0..100_000 {
            if self.schedule.sequences().next().is_none() {
                return ends;
            }
            self.next();
            for event in self.schedule.take_events() {
                if let Event::Finished { request, .. } = event {
                    ends.insert(request.0, self.step);
                }
            }
        }
        panic!("requests do not end: {ends:?}");
    }

    fn running_of(&self, tenant: Tenant) -> usize {
        let own = |it: &&RunningSequence| it.sequence.request.tenant.id == tenant.id;
        self.schedule.running.iter().filter(own).count()
    }
}

const A: Tenant = Tenant::new(1);
const B: Tenant = Tenant::new(2);

#[test]
fn a_tenants_first_request_does_not_wait_for_another_ones_queue() {
    let mut steps = Steps::new(8, 1000);
    for id in 0..64 {
        steps.submit(id, A, 4, 50);
    }
    (0..10).for_each(|_| drop(steps.next()));
    assert_eq!(steps.running_of(A), 8);
    steps.submit(100, B, 4, 50);
    let (seen, _) = steps.next();
    assert!(seen.iter().any(|(id, _)| *id == 100), "{seen:?}");
    assert_eq!((steps.running_of(A), steps.running_of(B)), (7, 1));
    let ends = steps.ends();
    assert!(ends[&100] <= 10 + 51, "one token in every step: {ends:?}");
    assert_eq!(ends.len(), 65, "and all of the others' come to their end");
}

#[test]
fn one_tenant_is_served_in_order_of_arrival() {
    let mut steps = Steps::new(2, 1000);
    for id in 0..6 {
        steps.submit(id, A, 4, 10);
    }
    let ends: Vec<u64> = steps.ends().into_values().collect();
    assert_eq!(ends, [10, 10, 20, 20, 30, 30]);
}

#[test]
fn places_are_shared_by_weight() {
    let mut steps = Steps::new(8, 1000);
    let heavy = Tenant { weight: 3, ..B };
    for id in 0..20 {
        steps.submit(id, A, 4, 400);
    }
    (0..5).for_each(|_| drop(steps.next()));
    for id in 100..120 {
        steps.submit(id, heavy, 4, 400);
    }
    (0..20).for_each(|_| drop(steps.next()));
    assert_eq!((steps.running_of(A), steps.running_of(heavy)), (2, 6));
    // Neither loses its places to the other again.
    for _ in 0..100 {
        steps.next();
        assert_eq!((steps.running_of(A), steps.running_of(heavy)), (2, 6));
    }
}

#[test]
fn prompts_are_read_in_parts_of_tenants_not_of_requests() {
    let mut steps = Steps::new(8, 1000);
    for id in 0..3 {
        steps.submit(id, A, 2000, 1);
    }
    steps.submit(9, B, 2000, 1);
    let (seen, _) = steps.next();
    let all: usize = seen.iter().map(|it| it.1).sum();
    let own = seen.iter().find(|(id, _)| *id == 9).unwrap().1;
    assert_eq!((own, all), (256, 512), "{seen:?}");
}

/// Milliseconds: four, a quarter of one for each stream, and two for a token of a prompt.
fn slow(prompt: usize, streams: usize) -> Duration {
    Duration::from_micros(4000 + 250 * streams as u64 + 2000 * prompt as u64)
}

/// Whether a stream keeps its part of the speed that it has alone, beside requests of another tenant.
fn check_quiet(submit: impl Fn(&mut Steps), ends: &[u64]) {
    let mut steps = Steps::new(32, 10_000);
    steps.cost = slow;
    steps.submit(0, A, 4, 30_000);
    steps.next();
    submit(&mut steps);
    let (mut time, mut longest) = (Duration::ZERO, Duration::ZERO);
    let mut left: BTreeSet<u64> = ends.iter().copied().collect();
    for _ in 0..20_000 {
        let (seen, took) = steps.next();
        assert!(seen.contains(&(0, 1)), "it has a token in every step: {seen:?}");
        time += took;
        longest = longest.max(took);
        for event in steps.schedule.take_events() {
            if let Event::Finished { request, .. } = event {
                left.remove(&request.0);
            }
        }
    }
    let kept = (slow(0, 1) * 20_000).as_secs_f64() / time.as_secs_f64();
    assert!(kept > 0.8, "{kept}");
    assert!(longest < Duration::from_millis(140), "{longest:?}");
    assert!(left.is_empty(), "not done: {left:?}");
}

#[test]
fn a_quiet_stream_keeps_its_speed_and_nobody_starves() {
    check_quiet(|steps| steps.submit(1, B, 4000, 2), &[1]);
    let many: Vec<u64> = (1..=64).collect();
    check_quiet(|steps| (1..=64).for_each(|id| steps.submit(id, B, 4, 100)), &many);
    // Of several tenants each has a stream of its own in every step.
    check_quiet(
        |steps| {
            for id in 1..=3 {
                steps.submit(id, Tenant::new(1 + id), 300, 100);
            }
        },
        &[1, 2, 3],
    );
}

#[test]
fn a_short_prompt_beside_streams_is_read_at_once() {
    let mut steps = Steps::new(32, 10_000);
    steps.cost = slow;
    steps.submit(0, A, 4, 10_000);
    (0..3).for_each(|_| drop(steps.next()));
    steps.submit(1, B, 100, 1);
    let begun = steps.step;
    while !steps
        .schedule
        .take_events()
        .iter()
        .any(|event| matches!(event, Event::Finished { request, .. } if *request == RequestId(1)))
    {
        steps.next();
    }
    assert!(steps.step - begun <= 5, "{}", steps.step - begun);
}

#[test]
fn memory_is_taken_from_whoever_has_more_than_his_part() {
    // Eight pages of 256 tokens.
    let mut steps = Steps::new(32, 8);
    for id in 0..4 {
        steps.submit(id, A, 400, 90);
    }
    (0..30).for_each(|_| drop(steps.next()));
    assert_eq!(steps.running_of(A), 4);
    steps.submit(9, B, 300, 20);
    steps.next();
    assert_eq!((steps.running_of(A), steps.running_of(B)), (3, 1));
    let ends = steps.ends();
    assert!((0..4).all(|id| ends[&9] < ends[&id]), "{ends:?}");
}

/// A constraint that is compiled, and whose masks come, when the test says so.
struct Gated(mpsc::Sender<String>, Mutex<mpsc::Receiver<()>>);

impl Gated {
    fn pass(&self, what: &str) {
        self.0.send(what.to_owned()).unwrap();
        self.1.lock().unwrap().recv_timeout(SOON).unwrap();
    }
}

struct GatedConstraint(std::sync::Arc<Gated>);

impl Constraint for GatedConstraint {
    fn mask(&mut self, _: &mut TokenMask) -> Result<(), ConstraintError> {
        self.0.pass("mask");
        // Longer than a step has time for.
        let begun = Instant::now();
        while begun.elapsed() < 4 * constrained::MASKS_WITHIN_STEP {
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn accept(&mut self, _: TokenId) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn must_stop(&mut self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self(self.0.clone()))
    }
}

struct Gates {
    compile: Gated,
    masks: std::sync::Arc<Gated>,
}

impl ConstraintFactory for Gates {
    fn build(&self, source: &ConstraintSource) -> Result<Box<dyn Constraint>, ConstraintError> {
        self.compile.pass(&source.0);
        Ok(Box::new(GatedConstraint(self.masks.clone())))
    }
}

/// A gate: what stands before it, and what opens it.
fn gate() -> (Gated, mpsc::Receiver<String>, mpsc::Sender<()>) {
    let (said, says) = mpsc::channel();
    let (open, opened) = mpsc::channel();
    (Gated(said, Mutex::new(opened)), says, open)
}

#[test]
fn grammars_are_compiled_and_masks_computed_while_others_go_on() {
    let (compile, compiles, go_on) = gate();
    let (masks, masked, unmask) = gate();
    let mut steps = Steps::new(8, 1000);
    steps.schedule.set_factory(Box::new(Gates { compile, masks: masks.into() }));
    steps.submit(0, A, 4, 1000);
    for (id, text) in [(1, "a"), (2, "b"), (3, "c")] {
        steps.submit_with(id, B, 4, 2, Some(text));
    }
    steps.submit_with(4, Tenant::new(3), 4, 2, Some("d"));
    let is_alone = |steps: &mut Steps| assert_eq!(steps.next().0.len(), 1);
    // Tenants take turns.
    for expected in ["a", "d", "b", "c"] {
        assert_eq!(compiles.recv_timeout(SOON).unwrap(), expected);
        steps.next();
        go_on.send(()).unwrap();
        // The next begins once this one was taken.
        steps.schedule.wait_for_threads(Instant::now() + SOON);
    }
    // The prompts are read but for their last tokens, and the stream goes on.
    (0..10).for_each(|_| drop(steps.next()));
    (0..10).for_each(|_| is_alone(&mut steps));
    assert!(steps.schedule.waits_for_threads());
    for _ in 0..2 * 4 {
        assert_eq!(masked.recv_timeout(SOON).unwrap(), "mask");
        unmask.send(()).unwrap();
        steps.schedule.wait_for_threads(Instant::now() + SOON);
        steps.next();
    }
    let ended = steps.schedule.take_events();
    let ended = ended.iter().filter(|event| matches!(event, Event::Finished { .. })).count();
    assert_eq!(ended, 4, "{:?}", steps.schedule.sequences().count());
    steps.schedule.cancel(RequestId(0), steps.now);
    assert!(!steps.schedule.waits_for_threads());
}

#[test]
fn a_request_that_is_cancelled_while_its_grammar_is_compiled_is_gone() {
    let (compile, compiles, go_on) = gate();
    let (masks, _masked, _unmask) = gate();
    let mut steps = Steps::new(8, 1000);
    steps.schedule.set_factory(Box::new(Gates { compile, masks: masks.into() }));
    steps.submit_with(1, A, 4, 2, Some("a"));
    compiles.recv_timeout(SOON).unwrap();
    steps.schedule.cancel(RequestId(1), steps.now);
    assert!(matches!(
        steps.schedule.take_events()[..],
        [Event::Finished { reason: FinishReason::Cancelled, .. }]
    ));
    go_on.send(()).unwrap();
    steps.submit_with(2, A, 4, 2, Some("b"));
    steps.schedule.wait_for_threads(Instant::now() + SOON);
    assert_eq!(compiles.recv_timeout(SOON).unwrap(), "b");
    assert!(steps.next().0.is_empty());
    go_on.send(()).unwrap();
}
