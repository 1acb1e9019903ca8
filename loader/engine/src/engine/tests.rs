//! Requests through a whole engine.

use std::{collections::BTreeMap, sync::Arc, thread, time::Duration};

use shardpack_collectives::{Deadline, Group, GroupError};
use shardpack_engine_api::*;
use shardpack_formats::memory::KvType;

use super::*;

mod ahead;
mod drafts;
mod prompts;
mod requests;
mod resume;

use crate::{
    backend::Cpu,
    loading::Package,
    model::Model,
    testing::{
        group::thread_groups,
        models::Expected,
        package::{Recipe, Weights},
    },
};

fn engine(package: &Package, options: EngineOptions) -> Engine<Cpu> {
    let backend = Cpu::new(1).unwrap();
    Engine::new(Model::load(package, &backend).unwrap(), backend, options)
}

/// Engines of one group: the leader here, the others on their threads.
struct Ranks {
    leader: Engine<Cpu>,
    followers: Vec<Engine<Cpu>>,
    epoch: u64,
    /// Steps that the latest answers took.
    steps: usize,
}

impl Ranks {
    fn new(recipe: Recipe, options: EngineOptions) -> Self {
        let packages = recipe.open();
        let mut engines: Vec<_> = packages.iter().map(|package| engine(package, options)).collect();
        let leader = engines.remove(0);
        Self { leader, followers: engines, epoch: 0, steps: 0 }
    }

    /// Forms a group of the next epoch for `work` and returns how each follower ended.
    fn formed(&mut self, body: impl FnOnce(&mut Engine<Cpu>, &dyn Group)) -> Vec<GroupError> {
        self.epoch += 1;
        let mut groups = thread_groups(1 + self.followers.len() as u32, self.epoch);
        let mine = groups.remove(0);
        thread::scope(|scope| {
            let threads: Vec<_> = self
                .followers
                .iter_mut()
                .zip(groups)
                .map(|(engine, group)| {
                    scope.spawn(move || {
                        loop {
                            if let Err(error) = engine.follow(group.as_ref()) {
                                return error;
                            }
                        }
                    })
                })
                .collect();
            body(&mut self.leader, mine.as_ref());
            mine.abort("done");
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Runs the requests together until all have ended.
    fn answers(&mut self, requests: &[GenerateRequest]) -> Vec<Answer> {
        let mut events = Vec::new();
        let mut steps = 0;
        let ended = self.formed(|leader, group| {
            for (id, request) in requests.iter().enumerate() {
                leader.submit(RequestId(id as u64), request.clone());
            }
            loop {
                match lead(leader, group, &mut events) {
                    StepOutcome::Worked => steps += 1,
                    StepOutcome::Waiting => {}
                    StepOutcome::Idle => break,
                }
            }
        });
        self.steps = steps;
        let done = GroupError::Aborted("done".to_owned());
        assert!(ended.iter().all(|error| *error == done), "{ended:?}");
        let mut answers = collect(events);
        (0..requests.len() as u64).map(|id| answers.remove(&RequestId(id)).unwrap()).collect()
    }
}

impl Ranks {
    /// The same with a group of the same epoch, in which the ranks keep what they have.
    fn answers_again(&mut self, requests: &[GenerateRequest]) -> Vec<Answer> {
        self.epoch -= 1;
        self.answers(requests)
    }
}

fn lead(leader: &mut Engine<Cpu>, group: &dyn Group, events: &mut Vec<Event>) -> StepOutcome {
    leader.lead(group, &mut |event| events.push(event)).unwrap()
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Vec<TokenLogprobs>,
    embedding: Vec<f32>,
    cached: u32,
    end: Option<Result<(FinishReason, u32, u32), String>>,
}

fn collect(events: Vec<Event>) -> BTreeMap<RequestId, Answer> {
    let mut answers: BTreeMap<_, Answer> = BTreeMap::new();
    for event in events {
        let answer = answers.entry(event.request()).or_default();
        assert_eq!(answer.end, None, "nothing follows the end: {event:?}");
        match event {
            Event::Token { token, logprobs, .. } => {
                answer.tokens.push(token.0);
                answer.logprobs.extend(logprobs);
            }
            Event::PromptLogprobs { first, logprobs, .. } => {
                assert_eq!(first as usize, answer.prompt_logprobs.len() + 1, "in order");
                assert!(answer.tokens.is_empty(), "before the answer");
                answer.prompt_logprobs.extend(logprobs);
            }
            Event::Embedding { values, .. } => answer.embedding = values,
            Event::Finished { reason, usage, .. } => {
                assert!(usage.prefill_seconds >= 0.0 && usage.decode_seconds >= 0.0);
                answer.cached = usage.cached_tokens;
                answer.end = Some(Ok((reason, usage.prompt_tokens, usage.completion_tokens)));
            }
            Event::Failed { message, .. } => answer.end = Some(Err(message)),
        }
    }
    answers
}

fn request(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    GenerateRequest::greedy(prompt.iter().map(|token| TokenId(*token)).collect(), max_tokens)
}

/// The usual options, but no rank is too slow for another.
const STANDARD: EngineOptions = EngineOptions {
    heartbeat_timeout: Duration::from_hours(1000),
    collective_timeout: Duration::from_hours(1000),
    ..EngineOptions::STANDARD
};

#[test]
fn greedy_tokens_are_those_of_transformers() {
    for (model, ranks) in [("llama", 1), ("llama", 3), ("llama-tied", 2), ("qwen3", 4)] {
        let Expected { tokens: [prompt, _], greedy, .. } = Expected::of(model);
        let mut ranks = Ranks::new(Recipe::plain(model, ranks), STANDARD);
        let count = greedy.len() as u32;
        let mut stopped = request(&prompt, 100);
        stopped.stop_tokens = vec![TokenId(greedy[7])];
        let before = greedy.iter().position(|token| *token == greedy[7]).unwrap();
        let answers = ranks.answers(&[request(&prompt, count), stopped]);
        let prompt = prompt.len() as u32;
        assert_eq!(answers[0].tokens, greedy, "{model}");
        assert_eq!(answers[0].end, Some(Ok((FinishReason::Length, prompt, count))));
        assert_eq!(answers[1].tokens, greedy[..before], "{model}, stopped");
        assert_eq!(answers[1].end, Some(Ok((FinishReason::Stop, prompt, before as u32))));
    }
}

/// Requests of different lengths, some of them sampled.
fn mixed() -> Vec<GenerateRequest> {
    let [a, b] = Expected::of("llama").tokens;
    // The last one's answer crosses a block of attention's keys.
    let long = b.repeat(4)[..250].to_vec();
    [
        (&a[..], 20, 0.0),
        (&b[..], 12, 1.1),
        (&a[..1], 30, 0.8),
        (&b[3..40], 9, 0.0),
        (&long[..], 12, 0.5),
    ]
    .into_iter()
    .enumerate()
    .map(|(seed, (prompt, max_tokens, temperature))| GenerateRequest {
        sampling: Sampling { temperature, seed: seed as u64, ..Sampling::GREEDY },
        ..request(prompt, max_tokens)
    })
    .collect()
}

#[test]
fn a_request_gets_the_same_tokens_alone_and_among_others() {
    let weights = Weights::Affine { bits: 4, group: 64 };
    let recipe = Recipe { align: 64, weights, ..Recipe::plain("llama", 2) };
    let mut ranks = Ranks::new(recipe, STANDARD);
    let alone: Vec<_> =
        mixed().iter().flat_map(|request| ranks.answers(std::slice::from_ref(request))).collect();
    assert!(alone.iter().all(|answer| !answer.tokens.is_empty()));
    assert_eq!(ranks.answers(&mixed()), alone, "together");
    for (max_sequences, prefill_tokens) in [(32, 7), (2, 512), (1, 1), (3, 33)] {
        let options =
            EngineOptions { max_sequences, prefill_tokens, chunked_prefill_tokens: 7, ..STANDARD };
        let answers = Ranks::new(recipe, options).answers(&mixed());
        assert_eq!(answers, alone, "{max_sequences} sequences, chunks of {prefill_tokens}");
    }
}

#[test]
fn a_stream_goes_on_after_the_group_has_formed_again() {
    let mut ranks = Ranks::new(Recipe::plain("llama", 2), STANDARD);
    let whole = ranks.answers(&mixed());
    let mut events = Vec::new();
    ranks.formed(|leader, group| {
        for (id, request) in mixed().into_iter().enumerate() {
            leader.submit(RequestId(id as u64), request);
        }
        for _ in 0..5 {
            lead(leader, group, &mut events);
        }
        group.abort("a cable was pulled");
        let error = leader.lead(group, &mut |event| panic!("{event:?}")).unwrap_err();
        assert_eq!(error, GroupError::Aborted("a cable was pulled".to_owned()));
    });
    ranks.formed(|leader, group| while lead(leader, group, &mut events) == StepOutcome::Worked {});
    assert_eq!(collect(events).into_values().collect::<Vec<_>>(), whole);
}

#[test]
fn a_reset_engine_knows_no_request() {
    let [prompt, _] = Expected::of("llama").tokens;
    let mut ranks = Ranks::new(Recipe::plain("llama", 2), STANDARD);
    ranks.formed(|leader, group| {
        leader.submit(RequestId(1), request(&prompt, 100));
        lead(leader, group, &mut Vec::new());
        leader.submit(RequestId(2), request(&prompt, 100));
        leader.submit(RequestId(3), request(&[], 1));
    });
    ranks.leader.reset();
    ranks.followers[0].reset();
    // Even a group of the same epoch is new to them.
    ranks.epoch -= 1;
    let answers = ranks.answers(&[request(&prompt, 2)]);
    assert_eq!(answers[0].tokens, Expected::of("llama").greedy[..2]);
}

#[test]
fn others_decode_while_a_long_prompt_is_read() {
    let [short, long] = Expected::of("qwen3").tokens;
    let options = EngineOptions { prefill_tokens: 8, chunked_prefill_tokens: 8, ..STANDARD };
    let mut ranks = Ranks::new(Recipe::plain("qwen3", 2), options);
    ranks.formed(|leader, group| {
        leader.submit(RequestId(1), request(&short[..3], 100));
        let mut events = Vec::new();
        lead(leader, group, &mut events);
        leader.submit(RequestId(2), request(&long, 1));
        for step in 1..=long.len() / 8 {
            lead(leader, group, &mut events);
            let tokens = events.iter().filter(|event| event.request() == RequestId(1)).count();
            assert_eq!(tokens, step + 1, "one token per step");
        }
        let ended = events.iter().any(
            |event| matches!(event, Event::Finished { request, .. } if *request == RequestId(2)),
        );
        assert!(ended, "{} tokens of prompt took ten steps", long.len());
    });
}

#[test]
fn cancelling_ends_a_request_with_the_next_step() {
    let [prompt, _] = Expected::of("llama").tokens;
    let options = EngineOptions { max_sequences: 1, ..STANDARD };
    let mut ranks = Ranks::new(Recipe::plain("llama", 2), options);
    ranks.formed(|leader, group| {
        let mut events = Vec::new();
        leader.submit(RequestId(1), request(&prompt, 100));
        leader.submit(RequestId(2), request(&prompt, 100));
        for _ in 0..3 {
            lead(leader, group, &mut events);
        }
        assert_eq!(events.len(), 3, "the second request waits for the first");
        leader.cancel(RequestId(2));
        leader.cancel(RequestId(1));
        leader.cancel(RequestId(3));
        lead(leader, group, &mut events);
        let answers = collect(events);
        let cancelled = |tokens| Some(Ok((FinishReason::Cancelled, prompt.len() as u32, tokens)));
        assert_eq!(answers[&RequestId(1)].end, cancelled(3));
        assert_eq!(answers[&RequestId(2)].end, cancelled(0));
        assert_eq!(lead(leader, group, &mut Vec::new()), StepOutcome::Idle);
        // The followers dropped the sequence, or its number would now be taken.
        leader.submit(RequestId(1), request(&prompt, 1));
        assert_eq!(lead(leader, group, &mut Vec::new()), StepOutcome::Worked);
    });
}

#[test]
fn requests_that_cannot_be_run_fail_and_full_ones_end() {
    let mut ranks = Ranks::new(Recipe::plain("llama", 1), STANDARD);
    let mut check = |request: GenerateRequest, expected: Result<(FinishReason, u32, u32), &str>| {
        let answer = ranks.answers(&[request]).remove(0);
        match (answer.end.unwrap(), expected) {
            (Ok(end), Ok(expected)) => assert_eq!(end, expected),
            (Err(message), Err(part)) => assert!(message.contains(part), "{message}"),
            (end, expected) => panic!("expected {expected:?}, found {end:?}"),
        }
    };
    // The model's longest sequence has 512 tokens.
    check(request(&[5; 513], 1), Err("513 tokens"));
    check(request(&[5; 512], 1), Ok((FinishReason::Length, 512, 0)));
    check(request(&[5; 509], 100), Ok((FinishReason::Length, 509, 3)));
    check(request(&[5], 0), Ok((FinishReason::Length, 1, 0)));
    check(request(&[], 1), Err("no tokens"));
    check(request(&[5, 512], 1), Err("token 512"));
    for temperature in [-1.0, f32::NAN, f32::INFINITY] {
        let sampling = Sampling { temperature, ..Sampling::GREEDY };
        check(GenerateRequest { sampling, ..request(&[5], 1) }, Err("is out of range"));
    }
}

/// A follower, and the leader's end of its group.
fn follower(options: EngineOptions) -> (Engine<Cpu>, Arc<dyn Group>, Arc<dyn Group>) {
    let mut groups = thread_groups(2, 1);
    let package = Recipe::plain("llama", 2).open().remove(1);
    let (mine, leaders) = (groups.remove(1), groups.remove(0));
    (engine(&package, options), mine, leaders)
}

#[test]
fn a_silent_leader_is_noticed() {
    let heartbeat_timeout = Duration::from_millis(20);
    let (mut engine, group, _leader) = follower(EngineOptions { heartbeat_timeout, ..STANDARD });
    let error = engine.follow(group.as_ref()).unwrap_err();
    assert!(matches!(error, GroupError::Timeout { rank: 0, .. }), "{error}");
}

#[test]
fn heartbeats_keep_followers_waiting() {
    let mut ranks = Ranks::new(Recipe::plain("llama", 2), STANDARD);
    ranks.formed(|leader, group| {
        for _ in 0..3 {
            leader.heartbeat(group).unwrap();
            assert_eq!(lead(leader, group, &mut Vec::new()), StepOutcome::Idle);
        }
        leader.submit(RequestId(1), request(&[5], 1));
        assert_eq!(lead(leader, group, &mut Vec::new()), StepOutcome::Worked);
        leader.heartbeat(group).unwrap();
    });
}

/// What a follower says of a plan, and whether it ends the group for the others.
fn refuse(plan: &plan::Plan, cut_bytes: usize) -> String {
    let (mut engine, mine, leaders) = follower(STANDARD);
    let mut bytes = plan.encode();
    bytes.truncate(bytes.len() - cut_bytes);
    let deadline = Deadline::after(STANDARD.collective_timeout);
    thread::scope(|scope| {
        let follower = scope.spawn(move || engine.follow(mine.as_ref()).unwrap_err());
        let hello = hello::Hello {
            vocab_size: 512,
            kv: KvType::F32,
            can_roll_back: true,
            pages: 9,
            prefill_tokens: 512,
        };
        hello.exchange(leaders.as_ref(), deadline).unwrap();
        leaders.broadcast(0, &mut bytes, deadline).unwrap();
        let error = follower.join().unwrap();
        let seen = leaders.barrier(deadline).unwrap_err();
        assert_eq!(seen, GroupError::Aborted(error.to_string()));
        error.to_string()
    })
}

#[test]
fn a_plan_that_does_not_fit_ends_the_group() {
    use plan::{NewSequence, PageId, Plan, Publish, ScheduledSequence};
    let id = RequestId(4);
    let params = sample::SamplingParams {
        sampling: Sampling::GREEDY,
        logprobs: None,
        prompt_output: PromptOutput::Nothing,
        prompt_len: 1,
        forbidden: vec![],
        forbidden_before: 0,
    };
    let begin = NewSequence { id, total: 9, params, pages: vec![], history: vec![] };
    let scheduled = |position, tokens: &[u32]| ScheduledSequence {
        id,
        position,
        tokens: tokens.to_vec(),
        drafts: 0,
        sample: true,
        next: None,
        masks: vec![],
    };
    let plan = |begin: &[NewSequence], scheduled: &[ScheduledSequence]| Plan {
        step: 1,
        begin: begin.to_vec(),
        scheduled: scheduled.to_vec(),
        ..Plan::default()
    };
    let check = |plan: Plan, reason: &str| {
        let error = refuse(&plan, 0);
        assert!(error.contains(reason), "expected {reason:?} in {error:?}");
    };
    check(Plan { step: 2, ..Plan::default() }, "expected step 1, found 2");
    check(Plan { step: 1, end: vec![id], ..Plan::default() }, "known sequence");
    check(plan(&[], &[scheduled(0, &[1])]), "known sequence");
    check(plan(&[begin.clone(), begin.clone()], &[]), "a new sequence");
    check(plan(std::slice::from_ref(&begin), &[scheduled(1, &[1])]), "position 0");
    check(
        plan(std::slice::from_ref(&begin), &[scheduled(0, &[1]), scheduled(1, &[2])]),
        "known sequence",
    );
    check(plan(std::slice::from_ref(&begin), &[scheduled(0, &[512])]), "a token below 512");
    check(plan(std::slice::from_ref(&begin), &[scheduled(0, &[1; 513])]), "position 0");
    let masks = vec![Some(TokenMask::all(500))];
    check(
        plan(std::slice::from_ref(&begin), &[ScheduledSequence { masks, ..scheduled(0, &[1]) }]),
        "a mask of 512",
    );
    let paged = NewSequence { pages: vec![PageId(3)], ..begin.clone() };
    check(plan(&[paged], &[]), "a known page");
    let with_history = NewSequence { history: vec![1], ..begin.clone() };
    check(plan(&[with_history], &[]), "the tokens of the cached pages");
    check(Plan { step: 1, drop: vec![PageId(3)], ..Plan::default() }, "a known page");
    let publish = vec![Publish { id, index: 0, page: PageId(3) }];
    check(Plan { step: 1, publish, ..Plan::default() }, "a full page of a known sequence");
    let short = refuse(&plan(std::slice::from_ref(&begin), &[]), 1);
    assert!(short.contains("ends early"), "{short}");
}
