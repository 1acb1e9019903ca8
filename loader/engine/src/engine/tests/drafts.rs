//! Speculative decoding changes only the number of steps: with accepted, rejected and proposed drafts.

use std::sync::Arc;

use shardpack_engine_api::*;

use super::{
    super::{counted::CountedGroup, schedule::Forced, *},
    Answer, Ranks, STANDARD, engine, lead, request,
    requests::{Factory, affine, long_prompt, long_requests, requests, without_cached},
};
use crate::{
    backend::{Cpu, KvCache},
    model::Model,
    testing::package::Recipe,
};

const OFF: EngineOptions = EngineOptions { speculate: Speculate::Off, ..STANDARD };

/// All tokens of requests as they come without drafts.
fn whole(requests: &[GenerateRequest], answers: &[Answer]) -> Vec<Vec<u32>> {
    let whole = |(request, answer): (&GenerateRequest, &Answer)| {
        request.prompt.iter().map(|it| it.0).chain(answer.tokens.iter().copied()).collect()
    };
    requests.iter().zip(answers).map(whole).collect()
}

/// Drafts that are accepted, but for those in every `wrong`th place of the sequence.
fn predicted(sequences: &[Vec<u32>], wrong: usize) -> Forced {
    let sequences = sequences.to_vec();
    Forced(Arc::new(move |tokens: &[u32]| {
        let known =
            sequences.iter().find(|all| all.starts_with(tokens) && all.len() > tokens.len());
        let next = known.map_or(&[][..], |all| &all[tokens.len()..]);
        let changed = |(place, token): (usize, &u32)| {
            let place = tokens.len() + place;
            if place.is_multiple_of(wrong) { (token + 1) % 500 } else { *token }
        };
        next.iter().enumerate().map(changed).collect()
    }))
}

/// Drafts that are nearly always rejected.
fn rejected_drafts() -> Forced {
    Forced(Arc::new(|tokens: &[u32]| {
        let last = tokens.last().copied().unwrap_or_default();
        (1..9).map(|i| (last * 7 + i * 31) % 512).collect()
    }))
}

fn forced(recipe: Recipe, options: EngineOptions, drafts: &Forced) -> Ranks {
    let mut ranks = Ranks::new(recipe, options);
    ranks.leader = engine(&recipe.open()[0], options).with_drafts(drafts.clone());
    ranks
}

/// Every kind of sampling in a batch of eight, on one and two ranks, with right drafts, with wrong
/// ones in between and with nothing but wrong ones; then again from the prefix cache.
#[test]
fn drafts_do_not_change_the_output() {
    for ranks in [1, 2] {
        let recipe = affine(ranks);
        let mut plain = Ranks::new(recipe, OFF);
        let expected = plain.answers(&requests());
        let steps = plain.steps;
        assert_eq!(plain.leader.drafts(), [0, 0]);
        let sequences = whole(&requests(), &expected);
        let wrongs = if ranks == 1 { &[3][..] } else { &[usize::MAX, 5, 2] };
        for &wrong in wrongs {
            let mut ranks = forced(recipe, STANDARD, &predicted(&sequences, wrong));
            assert_eq!(ranks.answers(&requests()), expected, "every {wrong}th is wrong");
            let [drafted, accepted] = ranks.leader.drafts();
            assert!(drafted > 0 && accepted > 0 && ranks.steps < steps, "{drafted} {accepted}");
            assert_eq!(accepted == drafted, wrong == usize::MAX, "{accepted} of {drafted}");
            // What was cached meanwhile is right: the next requests begin with it.
            let again = ranks.answers_again(&requests());
            assert!(again.iter().all(|answer| answer.cached == 256));
            assert_eq!(without_cached(again), without_cached(expected.clone()), "{wrong}, cached");
        }
        let mut ranks = forced(recipe, STANDARD, &rejected_drafts());
        assert_eq!(ranks.answers(&requests()), expected, "rejected drafts");
        assert!(ranks.leader.drafts()[0] > 100, "{:?}", ranks.leader.drafts());
        let again = without_cached(ranks.answers_again(&requests()));
        assert_eq!(again, without_cached(expected), "after rejected drafts");
    }
}

/// Pages that fill up with drafts in between are those that others find: a long answer's own.
#[test]
fn pages_of_a_drafted_answer_enter_the_prefix_cache() {
    let first = request(&long_prompt()[..240], 40);
    let expected = Ranks::new(affine(2), OFF).answers(std::slice::from_ref(&first));
    let sequences = whole(std::slice::from_ref(&first), &expected);
    let next = GenerateRequest {
        logprobs: Some(20),
        ..request(&[sequences[0].as_slice(), &[4, 5, 6]].concat(), 12)
    };
    let expected_next = Ranks::new(affine(2), OFF).answers(std::slice::from_ref(&next));
    for drafts in [predicted(&sequences, usize::MAX), predicted(&sequences, 4), rejected_drafts()] {
        let mut ranks = forced(affine(2), STANDARD, &drafts);
        assert_eq!(ranks.answers(std::slice::from_ref(&first)), expected);
        let after = ranks.answers_again(std::slice::from_ref(&next));
        assert_eq!(after[0].cached, 256, "the page that the answer has filled");
        assert_eq!(without_cached(after), expected_next);
    }
}

#[test]
fn preempted_sequences_with_drafts_get_the_same_tokens() {
    let mut requests = long_requests();
    for request in &mut requests {
        request.logprobs = Some(3);
    }
    let expected = Ranks::new(affine(2), OFF).answers(&requests);
    let sequences = whole(&requests, &expected);
    let shape = Ranks::new(affine(1), STANDARD).leader.model().cache_shape();
    let bytes = Cpu::new(1).unwrap().page_bytes(&shape);
    for pages in [2, 3] {
        for drafts in [predicted(&sequences, 3), rejected_drafts()] {
            let options = EngineOptions { kv_bytes: Some(pages * bytes), ..STANDARD };
            let mut ranks = forced(affine(2), options, &drafts);
            let answers = without_cached(ranks.answers(&requests));
            assert_eq!(answers, without_cached(expected.clone()), "{pages} pages");
        }
    }
}

/// What a request may end with, in the middle of right drafts.
#[test]
fn finish_reasons_are_those_without_drafts() {
    let prompt = &long_prompt()[..30];
    let long = request(prompt, 40);
    let found = Ranks::new(affine(1), OFF).answers(std::slice::from_ref(&long)).remove(0);
    let sequences = whole(std::slice::from_ref(&long), std::slice::from_ref(&found));
    let stop = TokenId(found.tokens[17]);
    let requests: Vec<_> = (1..9)
        .map(|max_tokens| request(prompt, max_tokens))
        .chain([
            GenerateRequest { stop_tokens: vec![stop], ..long.clone() },
            GenerateRequest { stop_tokens: vec![stop], min_tokens: 25, ..long },
            // To the model's last position.
            request(&long_prompt().repeat(2)[..500], 100),
        ])
        .collect();
    let expected = Ranks::new(affine(1), OFF).answers(&requests);
    let mut all = whole(&requests, &expected);
    all.extend(sequences);
    for drafts in [predicted(&all, usize::MAX), predicted(&all, 7), rejected_drafts()] {
        let mut ranks = forced(affine(1), STANDARD, &drafts);
        assert_eq!(ranks.answers(&requests), expected);
    }
}

/// Masks are those of each place: the constraint follows right drafts and forgets wrong ones.
#[test]
fn constraints_hold_with_drafts() {
    let with = |text: &str, temperature| GenerateRequest {
        constraint: Some(ConstraintSource(text.to_owned())),
        sampling: Sampling { temperature, seed: 4, ..Sampling::GREEDY },
        logprobs: Some(5),
        ..request(&long_prompt()[..30], 24)
    };
    let requests = [with("5", 0.0), with("40", 1.5), with("11", 0.8), with("40", 0.0)];
    let constrained = |options, drafts: Option<&Forced>| {
        let mut ranks = Ranks::new(affine(2), options);
        let leader = engine(&affine(2).open()[0], options).with_constraints(Box::new(Factory));
        ranks.leader = match drafts {
            Some(drafts) => leader.with_drafts(drafts.clone()),
            None => leader,
        };
        let answers = ranks.answers(&requests);
        (answers, ranks.leader.drafts())
    };
    let (expected, _) = constrained(OFF, None);
    let sequences = whole(&requests, &expected);
    for wrong in [usize::MAX, 4] {
        let (found, [_, accepted]) = constrained(STANDARD, Some(&predicted(&sequences, wrong)));
        assert_eq!(found, expected, "{wrong}");
        assert!(accepted > 10, "{accepted}");
    }
    assert_eq!(constrained(STANDARD, Some(&rejected_drafts())).0, expected);
}

/// Prompt lookup proposes a client's predicted output and a text that repeats itself.
#[test]
fn accepted_drafts_save_steps_and_are_counted() {
    let plain = GenerateRequest { logprobs: Some(2), ..request(&long_prompt()[..30], 60) };
    let mut off = Ranks::new(affine(2), OFF);
    let expected = off.answers(std::slice::from_ref(&plain)).remove(0);
    let answer: Vec<TokenId> = expected.tokens.iter().map(|token| TokenId(*token)).collect();
    let mut other = answer.clone();
    (other[9], other[30]) = (TokenId(1), TokenId(2));
    for (prediction, most_steps, least_right) in [(answer, 20, 55), (other, 35, 40)] {
        let predicting = GenerateRequest { prediction: prediction.clone(), ..plain.clone() };
        let mut ranks = Ranks::new(affine(2), STANDARD);
        let mut usage = None;
        let mut events = Vec::new();
        let mut steps = 0;
        ranks.formed(|leader, group| {
            leader.submit(RequestId(0), predicting.clone());
            while lead(leader, group, &mut events) == StepOutcome::Worked {
                steps += 1;
            }
        });
        for event in &events {
            if let Event::Finished { usage: found, .. } = event {
                usage = Some(*found);
            }
        }
        assert_eq!(super::collect(events)[&RequestId(0)], expected);
        let usage = usage.unwrap();
        let [right, wrong] = usage.prediction_tokens;
        assert!(steps < most_steps && off.steps > 60, "{steps} steps of {}", off.steps);
        assert!(right >= least_right && right + wrong == 60, "{right} {wrong}");
        assert!(usage.accepted_tokens >= 60 - steps as u32, "{usage:?}");
        assert!(usage.drafted_tokens >= usage.accepted_tokens);
    }
    let unknown = GenerateRequest { prediction: vec![TokenId(512)], ..plain };
    let refused = Ranks::new(affine(1), STANDARD).answers(&[unknown]).remove(0);
    assert!(refused.end.unwrap().unwrap_err().contains("token 512"));
}

#[test]
fn a_step_with_drafts_needs_no_extra_collectives() {
    let plain = request(&[5, 6], 30);
    let expected = Ranks::new(affine(2), OFF).answers(std::slice::from_ref(&plain));
    let sequences = whole(std::slice::from_ref(&plain), &expected);
    let counts = |drafts: &Forced, options| {
        let mut ranks = forced(affine(2), options, drafts);
        let mut all = Vec::new();
        ranks.formed(|leader, group| {
            let group = CountedGroup::new(group);
            leader.submit(RequestId(1), plain.clone());
            while lead(leader, &group, &mut Vec::new()) == StepOutcome::Worked {
                let counts = group.observer().take();
                all.push(
                    [counts.broadcasts, counts.all_reduces, counts.all_gathers].map(|it| it.count),
                );
            }
        });
        (all, ranks.leader.drafts())
    };
    let (with, [_, accepted]) = counts(&predicted(&sequences, 6), STANDARD);
    let none = Forced(Arc::new(|_: &[u32]| Vec::new()));
    let (without, _) = counts(&none, STANDARD);
    assert!(accepted > 15 && with.len() < without.len(), "{accepted}");
    // The first step takes the prompt; the last plan only says that the sequence has ended.
    let decoding = &with[1..with.len() - 1];
    assert!(decoding.iter().all(|counts| *counts == without[1]), "{with:?} {without:?}");
}

/// A leader with a draft model of its own that is worth asking.
fn with_draft(recipe: Recipe, options: EngineOptions, draft: Recipe) -> Ranks {
    let mut ranks = Ranks::new(recipe, options);
    let leader = engine(&recipe.open()[0], options);
    let draft = Model::load(&draft.open()[0], &Cpu::new(1).unwrap()).unwrap();
    ranks.leader = leader.with_draft_model(draft).unwrap().with_draft_cost(0.02);
    ranks
}

/// The target model as its own draft model, with every kind of sampling, constraints too, in a
/// batch of eight and alone, on one and two ranks; and a model whose drafts are rejected.
#[test]
fn a_draft_model_does_not_change_the_output() {
    let other = Recipe::plain("qwen3", 1);
    for ranks in [1, 2] {
        let recipe = affine(ranks);
        let mut plain = Ranks::new(recipe, OFF);
        let expected = plain.answers(&requests());
        for draft in [affine(1), other] {
            let mut ranks = with_draft(recipe, STANDARD, draft);
            assert_eq!(ranks.answers(&requests()), expected);
            for _ in 0..2 {
                let again = ranks.answers_again(&requests());
                assert_eq!(without_cached(again), without_cached(expected.clone()));
            }
            for (request, expected) in requests().iter().zip(&expected) {
                let alone = ranks.answers_again(std::slice::from_ref(request));
                assert_eq!(without_cached(alone), without_cached(vec![expected.clone()]));
            }
        }
    }
}

/// A prompt that is prefilled in several steps, an answer without repetitions: the draft model's
/// tokens are accepted, in fewer steps.
#[test]
fn a_draft_model_saves_steps_and_reuses_cached_prefixes() {
    let first = request(&long_prompt().repeat(2)[..400], 60);
    let mut plain = Ranks::new(affine(2), OFF);
    let expected = plain.answers(std::slice::from_ref(&first));
    let mut ranks = with_draft(affine(2), STANDARD, affine(1));
    assert_eq!(ranks.answers(std::slice::from_ref(&first)), expected);
    let [drafted, accepted] = ranks.leader.drafts();
    assert!(accepted * 10 >= drafted * 9 && accepted > 10, "{accepted} of {drafted}");
    assert!(ranks.steps + accepted as usize <= plain.steps + 2, "{} {}", ranks.steps, plain.steps);
    // Drafts after pages of the prefix cache are accepted as often.
    ranks.answers_again(std::slice::from_ref(&first));
    let [drafted, accepted] = [0, 1].map(|at| ranks.leader.drafts()[at] - [drafted, accepted][at]);
    assert!(accepted * 10 >= drafted * 9 && accepted > 10, "again: {accepted} of {drafted}");
}

#[test]
fn a_draft_model_survives_preemption() {
    let requests = long_requests();
    let expected = Ranks::new(affine(2), OFF).answers(&requests);
    let shape = Ranks::new(affine(1), STANDARD).leader.model().cache_shape();
    let bytes = Cpu::new(1).unwrap().page_bytes(&shape);
    for pages in [2, 3] {
        let options = EngineOptions { kv_bytes: Some(pages * bytes), ..STANDARD };
        let mut ranks = with_draft(affine(2), options, affine(1));
        let answers = without_cached(ranks.answers(&requests));
        assert_eq!(answers, without_cached(expected.clone()), "{pages} pages");
    }
}

#[test]
fn sharded_draft_models_are_refused() {
    let refused = |draft: Recipe| {
        let cpu = Cpu::new(1).unwrap();
        let draft = Model::load(&draft.open()[0], &cpu).unwrap();
        let leader = engine(&affine(1).open()[0], STANDARD);
        leader.with_draft_model(draft).map(drop).unwrap_err().to_string()
    };
    assert!(refused(affine(2)).contains("sharded for 2 nodes"));
}
