//! What requests may ask for, and how they share memory and steps.

use shardpack_collectives::LinkedGroup;
use shardpack_engine_api::*;
use shardpack_formats::memory::KvType;

use super::{
    super::{counted::CountedGroup, *},
    Answer, Ranks, STANDARD, collect, engine, lead, request,
};
use crate::{
    backend::{Cpu, KvCache, TensorParallel, Tensors},
    model::{Batch, Model},
    testing::{
        models::Expected,
        package::{Recipe, Weights},
    },
};

pub(super) fn affine(ranks: u32) -> Recipe {
    let weights = Weights::Affine { bits: 4, group: 64 };
    Recipe { align: 64, weights, ..Recipe::plain("llama", ranks) }
}

/// 300 tokens, so that one page can be shared.
pub(super) fn long_prompt() -> Vec<u32> {
    let [_, b] = Expected::of("llama").tokens;
    b.repeat(5)[..300].to_vec()
}

/// Four that together need more memory than some engines have.
pub(super) fn long_requests() -> Vec<GenerateRequest> {
    let long = |index: u32| {
        let seed = u64::from(index);
        let sampling =
            Sampling { temperature: 0.7, seed, frequency_penalty: 0.3, ..Sampling::GREEDY };
        let prompt = &long_prompt()[index as usize..][..250 - index as usize * 3];
        GenerateRequest { sampling, ..request(prompt, 20) }
    };
    (0..4).map(long).collect()
}

/// Every kind of sampling, with long prompts that begin alike.
pub(super) fn requests() -> Vec<GenerateRequest> {
    let base = Sampling { temperature: 0.9, seed: 3, ..Sampling::GREEDY };
    let samplings = [
        Sampling::GREEDY,
        base.clone(),
        Sampling { top_k: 30, ..base.clone() },
        Sampling { top_p: 0.9, ..base.clone() },
        Sampling { min_p: 0.05, ..base.clone() },
        Sampling { repetition_penalty: 1.2, ..Sampling::GREEDY },
        Sampling { presence_penalty: 0.7, frequency_penalty: 0.2, ..base.clone() },
        Sampling { logit_bias: vec![(TokenId(7), 3.0)], top_k: 400, ..base },
    ];
    let prompt = long_prompt();
    let (last, _) = prompt.split_last().unwrap();
    samplings
        .into_iter()
        .enumerate()
        .map(|(index, sampling)| GenerateRequest {
            sampling,
            logprobs: Some(20),
            ..request(&[&prompt[..290 + index], &[*last]].concat(), 9)
        })
        .collect()
}

pub(super) fn without_cached(mut answers: Vec<Answer>) -> Vec<Answer> {
    for answer in &mut answers {
        answer.cached = 0;
    }
    answers
}

/// Alone and among seven others, in chunks of two sizes, cold and from the prefix cache: the
/// same tokens with the same log probabilities, bit for bit.
#[test]
fn outputs_are_batch_invariant() {
    let cold: Vec<_> = requests()
        .iter()
        .map(|request| {
            let mut ranks = Ranks::new(affine(2), STANDARD);
            ranks.answers(std::slice::from_ref(request)).remove(0)
        })
        .collect();
    assert!(cold.iter().all(|answer| answer.cached == 0 && answer.logprobs.len() == 9));
    let mut ranks = Ranks::new(affine(2), STANDARD);
    assert_eq!(ranks.answers(&requests()), cold, "together");
    // A group of the same epoch keeps its pages.
    let warm = ranks.answers_again(&requests());
    assert!(warm.iter().all(|answer| answer.cached == 256), "from the prefix cache");
    assert_eq!(without_cached(warm), cold);
    let small = EngineOptions { prefill_tokens: 37, chunked_prefill_tokens: 5, ..STANDARD };
    let mut ranks = Ranks::new(affine(2), small);
    assert_eq!(without_cached(ranks.answers(&requests())), cold, "in small chunks");
}

/// A prefix is found by those who share it, and nobody else can tell that it was asked for.
#[test]
fn tenants_share_prefixes_only_where_they_say_so() {
    let mut ranks = Ranks::new(affine(1), STANDARD);
    let of = |tenant| GenerateRequest { tenant, ..request(&long_prompt(), 2) };
    let shared = |id| Tenant { prefix_cache: 77, ..Tenant::new(id) };
    let first = ranks.answers(&[of(Tenant::new(1))]);
    let cached = |ranks: &mut Ranks, tenant| {
        let answer = ranks.answers_again(&[of(tenant)]).remove(0);
        assert_eq!(answer.tokens, first[0].tokens);
        answer.cached
    };
    assert_eq!(cached(&mut ranks, Tenant::new(2)), 0, "another tenant's");
    assert_eq!(cached(&mut ranks, Tenant::NOBODY), 0);
    assert_eq!(cached(&mut ranks, Tenant::new(1)), 256, "its own");
    assert_eq!(cached(&mut ranks, shared(3)), 0);
    assert_eq!(cached(&mut ranks, shared(4)), 256, "of one group");
}

/// All logits of the last tokens of a sequence, by a model of one rank.
struct Alone {
    model: Model<Cpu>,
    backend: Cpu,
}

type Cache = <Cpu as KvCache>::Cache;

impl Alone {
    fn new(recipe: Recipe, threads: usize, kv: KvType) -> Self {
        let backend = Cpu::new(threads).unwrap().with_kv(kv);
        Self { model: Model::load(&recipe.open()[0], &backend).unwrap(), backend }
    }

    /// Logits of the last row of each sequence; `rows` are each one's tokens and position.
    fn step(&self, rows: &[(&[u32], u32)], caches: &mut [&mut Cache]) -> Vec<Vec<u32>> {
        let mut batch = Batch::default();
        for (tokens, position) in rows {
            batch.tokens.extend(*tokens);
            batch.positions.extend(*position..*position + tokens.len() as u32);
            batch.lengths.push(tokens.len());
            batch.totals.push(512);
            batch.logit_rows.push(batch.tokens.len() - 1);
        }
        let group = LinkedGroup::single(1);
        let timeout = STANDARD.collective_timeout;
        let ranks = crate::backend::Ranks::all(&group, timeout);
        let logits = self.backend.run(|| {
            let logits = self.model.forward(&self.backend, &batch, caches, &ranks).unwrap();
            self.backend.read(logits.unwrap(), &ranks).unwrap()
        });
        let vocab = self.model.spec().vocab_size as usize;
        logits.chunks(vocab).map(|row| row.iter().map(|it| it.to_bits()).collect()).collect()
    }

    fn cache(&self) -> Cache {
        self.backend.cache(&self.model.cache_shape(), &[])
    }

    /// Logits after a prompt read in chunks.
    fn read(&self, prompt: &[u32], chunk: usize, cache: &mut Cache) -> Vec<u32> {
        let mut last = Vec::new();
        for (index, tokens) in prompt.chunks(chunk).enumerate() {
            last = self.step(&[(tokens, (index * chunk) as u32)], &mut [cache]).remove(0);
        }
        last
    }
}

#[test]
fn logits_are_batch_invariant() {
    let prompt = long_prompt();
    for kv in [KvType::F32, KvType::Bf16, KvType::Q8] {
        let one = Alone::new(affine(1), 1, kv);
        let mut cache = one.cache();
        let expected = one.read(&prompt, 300, &mut cache);
        let next = one.step(&[(&[5], 300)], &mut [&mut cache]).remove(0);
        for (threads, chunk) in [(1, 64), (2, 300), (2, 101)] {
            let other = Alone::new(affine(1), threads, kv);
            let found = other.read(&prompt, chunk, &mut other.cache());
            assert_eq!(found, expected, "{kv:?}, {threads} threads, chunks of {chunk}");
        }
        // On a page of the first sequence.
        let page = one.backend.page(&cache, 0);
        let mut shared = one.backend.cache(&one.model.cache_shape(), &[page]);
        let found = one.step(&[(&prompt[256..], 256)], &mut [&mut shared]);
        assert_eq!(found[0], expected, "{kv:?}, on a shared page");
        // In a batch of eight, of which the others read their prompts.
        let mut others: Vec<_> = (0..7).map(|_| one.cache()).collect();
        let rows: Vec<(&[u32], u32)> =
            (0..7).map(|i| (&prompt[i * 11..i * 20 + 9], 0)).chain([(&[5][..], 300)]).collect();
        let mut caches: Vec<_> = others.iter_mut().chain([&mut shared]).collect();
        assert_eq!(one.step(&rows, &mut caches)[7], next, "{kv:?}, among others");
    }
}

#[test]
fn preempted_sequences_get_the_same_tokens() {
    let requests = long_requests();
    let expected = Ranks::new(affine(2), STANDARD).answers(&requests);
    let ranks = Ranks::new(affine(2), STANDARD);
    // The rank with the larger part decides how many pages there are.
    let page_bytes = |engine: &Engine<Cpu>| {
        let shape = engine.model().cache_shape();
        Cpu::new(1).unwrap().page_bytes(&shape)
    };
    let bytes = page_bytes(&ranks.leader).max(page_bytes(&ranks.followers[0]));
    for pages in [2, 3, 5] {
        let options = EngineOptions { kv_bytes: Some(pages * bytes), ..STANDARD };
        let mut ranks = Ranks::new(affine(2), options);
        let answers = ranks.answers(&requests);
        assert_eq!(without_cached(answers), expected, "{pages} pages");
        assert!(ranks.steps > 24, "{} steps are too few for {pages} pages", ranks.steps);
    }
    // A sequence ends where the memory does, and one that cannot begin says so.
    let options = EngineOptions { kv_bytes: Some(bytes), ..STANDARD };
    let mut ranks = Ranks::new(affine(2), options);
    let answers = ranks.answers(&[request(&long_prompt()[..250], 20), request(&long_prompt(), 2)]);
    assert_eq!(answers[0].end, Some(Ok((FinishReason::Length, 250, 6))));
    let refused = answers[1].end.clone().unwrap().unwrap_err();
    assert!(refused.contains("300 tokens") && refused.contains("256"), "{refused}");
}

/// Lets only every third token pass, and ends after `left`.
struct Thirds {
    left: u32,
}

impl Constraint for Thirds {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        (0..mask.vocab_size())
            .filter(|token| token % 3 != 0)
            .for_each(|token| mask.forbid(TokenId(token)));
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        self.left -= 1;
        if token.0.is_multiple_of(3) {
            Ok(())
        } else {
            Err(ConstraintError("not a third".to_owned()))
        }
    }

    fn must_stop(&mut self) -> bool {
        self.left == 0
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self { left: self.left })
    }
}

/// Lets nothing pass.
struct Nothing;

impl Constraint for Nothing {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        *mask = TokenMask::none(mask.vocab_size());
        Ok(())
    }

    fn accept(&mut self, _: TokenId) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn must_stop(&mut self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self)
    }
}

pub(super) struct Factory;

impl ConstraintFactory for Factory {
    fn build(&self, source: &ConstraintSource) -> Result<Box<dyn Constraint>, ConstraintError> {
        match source.0.as_str() {
            "nothing" => Ok(Box::new(Nothing)),
            text => match text.parse() {
                Ok(left) => Ok(Box::new(Thirds { left })),
                Err(_) => Err(ConstraintError(format!("{text:?} is no number"))),
            },
        }
    }
}

#[test]
fn constraints_hold_on_all_ranks() {
    let mut ranks = Ranks::new(affine(2), STANDARD);
    ranks.leader = engine(&affine(2).open()[0], STANDARD).with_constraints(Box::new(Factory));
    let with = |text: &str, sampling| GenerateRequest {
        constraint: Some(ConstraintSource(text.to_owned())),
        sampling,
        ..request(&long_prompt()[..30], 12)
    };
    let hot = Sampling { temperature: 1.5, seed: 1, ..Sampling::GREEDY };
    let answers = ranks.answers(&[
        with("5", Sampling::GREEDY),
        with("40", hot),
        with("x", Sampling::GREEDY),
        with("nothing", Sampling::GREEDY),
        request(&long_prompt()[..30], 12),
    ]);
    assert_eq!(answers[0].end, Some(Ok((FinishReason::Stop, 30, 5))));
    assert_eq!(answers[1].end, Some(Ok((FinishReason::Length, 30, 12))));
    assert!(answers[..2].iter().flat_map(|it| &it.tokens).all(|token| token % 3 == 0));
    assert_eq!(answers[2].end, Some(Err("\"x\" is no number".to_owned())));
    assert!(answers[3].end.clone().unwrap().unwrap_err().contains("allows no token"));
    assert!(answers[4].tokens.iter().any(|token| token % 3 != 0));
    let mut plain = Ranks::new(affine(1), STANDARD);
    let refused = plain.answers(&[with("5", Sampling::GREEDY)]).remove(0);
    assert_eq!(refused.end, Some(Err("this engine supports no constrained decoding".to_owned())));
}

#[test]
fn answers_may_not_stop_too_early() {
    let Expected { tokens: [prompt, _], greedy, .. } = Expected::of("llama");
    let mut ranks = Ranks::new(Recipe::plain("llama", 2), STANDARD);
    let stop = |min_tokens| GenerateRequest {
        min_tokens,
        stop_tokens: vec![TokenId(greedy[2])],
        ..request(&prompt, 8)
    };
    let answers = ranks.answers(&[stop(0), stop(2), stop(5)]);
    let before = greedy.iter().position(|token| *token == greedy[2]).unwrap();
    assert_eq!(answers[0].tokens, greedy[..before]);
    assert!(answers[1].tokens.len() >= 2 && answers[2].tokens.len() >= 5);
    assert!(!answers[2].tokens[..5].contains(&greedy[2]));
}

#[test]
fn queues_are_bounded_and_deadlines_kept() {
    let options = EngineOptions { max_sequences: 1, max_waiting: 2, ..STANDARD };
    let mut ranks = Ranks::new(Recipe::plain("llama", 1), options);
    let late = GenerateRequest { timeout_ms: Some(0), ..request(&[5], 3) };
    let answers = ranks.answers(&[late, request(&[5], 2), request(&[6], 2)]);
    assert_eq!(answers[0].end, Some(Ok((FinishReason::Deadline, 1, 0))));
    assert_eq!(answers[1].end, Some(Ok((FinishReason::Length, 1, 2))));
    assert_eq!(answers[2].end, Some(Err("2 requests are already waiting".to_owned())));
}

#[test]
fn a_short_prompt_does_not_wait_for_the_end_of_a_long_one() {
    let options = EngineOptions { prefill_tokens: 16, ..STANDARD };
    let mut ranks = Ranks::new(Recipe::plain("llama", 2), options);
    ranks.formed(|leader, group| {
        let mut events = Vec::new();
        leader.submit(RequestId(1), request(&long_prompt(), 1));
        lead(leader, group, &mut events);
        leader.submit(RequestId(2), request(&long_prompt()[..16], 1));
        lead(leader, group, &mut events);
        assert!(events.is_empty());
        lead(leader, group, &mut events);
        assert!(collect(events)[&RequestId(2)].end.is_some(), "eight tokens a step");
    });
}

#[test]
fn a_step_takes_as_many_messages_as_the_architecture_needs() {
    let options = STANDARD;
    for (cut, sampling, most_bytes) in [
        (false, Sampling::GREEDY, 30),
        (true, Sampling { temperature: 1.0, ..Sampling::GREEDY }, 30),
        (false, Sampling { temperature: 1.0, top_k: 40, ..Sampling::GREEDY }, 500),
    ] {
        let recipe = Recipe { embedding_sharded: cut, ..Recipe::plain("llama", 2) };
        let mut ranks = Ranks::new(recipe, options);
        let layers = ranks.leader.model().spec().layers.len() as u64;
        ranks.formed(|leader, group| {
            let group = CountedGroup::new(group);
            leader.submit(RequestId(1), GenerateRequest { sampling, ..request(&[5, 6], 9) });
            let mut events = Vec::new();
            lead(leader, &group, &mut events);
            group.observer().take();
            lead(leader, &group, &mut events);
            let counts = group.observer().take();
            assert_eq!(counts.broadcasts.count, 1, "the plan");
            assert_eq!(counts.all_reduces.count, 2 * layers + u64::from(cut));
            assert_eq!(counts.all_gathers.count, 1, "the logits");
            // Candidates, not a part of the vocabulary.
            assert!(counts.all_gathers.bytes < most_bytes, "{} bytes", counts.all_gathers.bytes);
        });
    }
}

#[test]
fn ranks_that_store_keys_otherwise_do_not_start() {
    let mut ranks = Ranks::new(Recipe::plain("llama", 2), STANDARD);
    let package = Recipe::plain("llama", 2).open().remove(1);
    let backend = Cpu::new(1).unwrap().with_kv(KvType::F16);
    let model = Model::load(&package, &backend).unwrap();
    ranks.followers[0] = Engine::new(model, backend, STANDARD);
    let ended = ranks.formed(|leader, group| {
        leader.submit(RequestId(1), request(&[5], 1));
        let error = leader.lead(group, &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains("--kv-type"), "{error}");
    });
    assert_eq!(ended.len(), 1);
}
