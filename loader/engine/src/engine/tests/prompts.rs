//! Log probabilities of prompts and embeddings.

use shardpack_engine_api::*;

use super::{
    Answer, Ranks, STANDARD, collect, lead, request,
    requests::{affine, long_prompt},
};
use crate::{
    backend::{Cpu, KvCache},
    engine::{EngineOptions, RankEngine, StepOutcome, logits},
    testing::{group::thread_groups, models::Expected, package::Recipe},
};

fn scored(prompt: &[u32], max_tokens: u32, top: u32) -> GenerateRequest {
    let prompt_output = PromptOutput::Logprobs(top);
    GenerateRequest { prompt_output, ..request(prompt, max_tokens) }
}

/// By all logits of the sequence, in f64.
fn expected(recipe: Recipe, prompt: &[u32]) -> Vec<f64> {
    let tokens: Vec<_> = prompt.iter().map(|token| TokenId(*token)).collect();
    let packages = recipe.open();
    let groups = thread_groups(packages.len() as u32, 1);
    let logits = logits(&packages, &groups, &tokens, 1).unwrap();
    let vocab = logits.len() / prompt.len();
    let logprob = |(row, next): (&[f32], &u32)| {
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        f64::from(row[*next as usize]) - sum.ln()
    };
    logits.chunks(vocab).zip(&prompt[1..]).map(logprob).collect()
}

fn check(found: &[TokenLogprobs], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(found.logprob) - expected).abs();
        assert!(difference < 1e-5, "token {index}: {found:?}, expected {expected}");
    }
}

/// Values without the engine's own scheduling: the same on one rank and on several, in any chunks,
/// alone and among others.
#[test]
fn prompt_logprobs_are_those_of_all_logits() {
    let prompt = long_prompt();
    for recipe in [Recipe::plain("llama", 1), Recipe::plain("llama-tied", 2), affine(2), affine(3)]
    {
        let expected = expected(recipe, &prompt);
        let mut ranks = Ranks::new(recipe, STANDARD);
        let whole = ranks.answers(&[scored(&prompt, 3, 4)]).remove(0);
        check(&whole.prompt_logprobs, &expected);
        assert_eq!(whole.tokens.len(), 3);
        for found in &whole.prompt_logprobs {
            assert_eq!(found.top.len(), 4);
            assert!(found.top.iter().all(|top| top.1 <= found.top[0].1));
            assert!(found.logprob <= found.top[0].1);
        }
        let small = EngineOptions { prefill_tokens: 37, chunked_prefill_tokens: 5, ..STANDARD };
        let mut ranks = Ranks::new(recipe, small);
        let others = [request(&prompt[5..], 20), scored(&prompt, 3, 4), scored(&prompt[9..], 0, 0)];
        let answers = ranks.answers(&others);
        assert_eq!(answers[1], whole, "among others, in small chunks");
        assert_eq!(answers[2].prompt_logprobs.len(), prompt.len() - 10);
    }
}

#[test]
fn a_prompt_alone_generates_nothing() {
    let prompt = long_prompt();
    let mut ranks = Ranks::new(affine(2), STANDARD);
    let answers = ranks.answers(&[scored(&prompt, 0, 1), scored(&prompt[..1], 0, 1)]);
    let ended = |tokens| Some(Ok((FinishReason::Length, tokens, 0)));
    assert_eq!((answers[0].tokens.len(), answers[0].prompt_logprobs.len()), (0, 299));
    assert_eq!(answers[0].end, ended(300));
    assert_eq!(answers[1], Answer { end: ended(1), ..Answer::default() });
}

#[test]
fn scored_prompts_take_nothing_from_the_prefix_cache() {
    let prompt = long_prompt();
    let mut ranks = Ranks::new(affine(2), STANDARD);
    let cold = ranks.answers(&[scored(&prompt, 2, 2)]);
    let warm = ranks.answers_again(&[scored(&prompt, 2, 2)]);
    assert_eq!((warm[0].cached, &warm), (0, &cold));
    // Others share the pages that it filled.
    assert_eq!(ranks.answers_again(&[request(&prompt, 2)])[0].cached, 256);
}

#[test]
fn preempted_prompts_are_reported_once() {
    let requests: Vec<_> =
        (0..4).map(|index| scored(&long_prompt()[index..][..250], 20, 1)).collect();
    let mut roomy = Ranks::new(affine(1), STANDARD);
    let expected = roomy.answers(&requests);
    let model = roomy.leader.model();
    let backend = Cpu::new(1).unwrap();
    let page = backend.page_bytes(&model.cache_shape());
    let tight = EngineOptions { kv_bytes: Some(page * 3), ..STANDARD };
    let mut ranks = Ranks::new(affine(1), tight);
    assert_eq!(ranks.answers(&requests), expected);
    assert!(ranks.steps > roomy.steps, "some were preempted");
}

#[test]
fn a_cancelled_prompt_ends() {
    let mut ranks = Ranks::new(affine(2), EngineOptions { prefill_tokens: 64, ..STANDARD });
    let mut events = Vec::new();
    ranks.formed(|leader, group| {
        leader.submit(RequestId(1), scored(&long_prompt(), 4, 1));
        lead(leader, group, &mut events);
        leader.cancel(RequestId(1));
        while lead(leader, group, &mut events) == StepOutcome::Worked {}
    });
    let answer = collect(events).remove(&RequestId(1)).unwrap();
    assert_eq!(answer.prompt_logprobs.len(), 64);
    assert_eq!(answer.end, Some(Ok((FinishReason::Cancelled, 300, 0))));
}

#[test]
fn embeddings_are_the_last_hidden_vector_whatever_the_ranks_and_chunks() {
    let [prompt, _] = Expected::of("llama").tokens;
    let embed = GenerateRequest { prompt_output: PromptOutput::Embedding, ..request(&prompt, 0) };
    let mut expected: Option<Vec<f32>> = None;
    for (ranks, prefill_tokens) in [(1, 512), (1, 7), (2, 512), (3, 11)] {
        let options = EngineOptions { prefill_tokens, ..STANDARD };
        let mut ranks = Ranks::new(Recipe::plain("llama", ranks), options);
        let answer = ranks.answers(&[embed.clone(), request(&prompt, 3)]).remove(0);
        assert_eq!(answer.end, Some(Ok((FinishReason::Length, prompt.len() as u32, 0))));
        let expected = expected.get_or_insert_with(|| answer.embedding.clone());
        assert_eq!(expected.len(), answer.embedding.len());
        let difference = expected.iter().zip(&answer.embedding).map(|(a, b)| (a - b).abs());
        assert!(difference.fold(0.0, f32::max) < 5e-5);
    }
}
