//! Sampling against plain arithmetic, and between ranks.

use std::{thread, time::Duration};

use shardpack_engine_api::{PromptOutput, Sampling, TokenId};

use super::*;
use crate::testing::group::thread_groups;

const TIMEOUT: Duration = Duration::from_mins(10);

fn params_of(sampling: Sampling) -> SamplingParams {
    SamplingParams {
        sampling,
        logprobs: None,
        prompt_output: PromptOutput::Nothing,
        prompt_len: 0,
        forbidden: vec![],
        forbidden_before: 0,
    }
}

/// Samples a row on one rank.
fn sample_row(
    logits: &[f32],
    sampler: &Sampler,
    index: u32,
    mask: Option<&TokenMask>,
) -> SampledToken {
    let row = Row { sampler, index, drafts: &[], mask };
    let alone = thread_groups(1, 1).remove(0);
    let ranks = Ranks::all(alone.as_ref(), TIMEOUT);
    let vocab_size = logits.len();
    let whole = Logits {
        values: logits,
        chosen: Vec::new(),
        range: 0..vocab_size,
        ranges: None,
        vocab_size,
    };
    sample(&whole, &[row], &ranks).unwrap().remove(0)
}

fn token(logits: &[f32], sampling: Sampling, index: u32) -> Option<u32> {
    sample_row(logits, &Sampler::new(params_of(sampling)), index, None).token
}

#[test]
fn greedy_takes_the_highest_and_the_lower_id_of_a_tie() {
    let check = |logits: &[f32], expected| assert_eq!(token(logits, Sampling::GREEDY, 3), expected);
    check(&[0.0, 2.0, 1.0], Some(1));
    check(&[1.0, 3.0, 3.0], Some(1));
    check(&[-0.0, 0.0], Some(0));
    check(&[f32::NAN, -5.0, f32::NAN], Some(1));
    check(&[f32::NEG_INFINITY, f32::NEG_INFINITY], Some(0));
    check(&[1.0, f32::INFINITY, f32::INFINITY], Some(1));
    check(&[f32::NAN], None);
    check(&[], None);
}

/// How often each token comes, against probabilities.
fn check_frequencies(logits: &[f32], sampling: &Sampling, expected: &[f64]) {
    let draws = 40_000;
    let mut counts = vec![0_u32; logits.len()];
    for index in 0..draws {
        counts[token(logits, sampling.clone(), index).unwrap() as usize] += 1;
    }
    for (count, expected) in counts.iter().zip(expected) {
        let found = f64::from(*count) / f64::from(draws);
        // Four standard deviations of a probability of a half.
        assert!((found - expected).abs() < 0.01, "{sampling:?}: {counts:?} {expected:?}");
        assert!(*expected > 0.0 || *count == 0, "{sampling:?}: {counts:?}");
    }
}

#[test]
fn frequencies_follow_the_softmax_of_what_the_filters_keep() {
    let logits = [0.0, 1.0, f32::NEG_INFINITY, 2.0, -1.0];
    let temperature = 1.5;
    let softmax = |kept: &[usize]| {
        let weight = |i: usize| f64::from(logits[i] / temperature).exp();
        let total: f64 = kept.iter().map(|i| weight(*i)).sum();
        (0..logits.len())
            .map(|i| if kept.contains(&i) { weight(i) / total } else { 0.0 })
            .collect::<Vec<_>>()
    };
    let base = Sampling { temperature, seed: 11, ..Sampling::GREEDY };
    check_frequencies(&logits, &base, &softmax(&[0, 1, 3, 4]));
    let top_k = Sampling { top_k: 2, ..base.clone() };
    check_frequencies(&logits, &top_k, &softmax(&[1, 3]));
    // Of all, the first two have 0.79.
    let all = softmax(&[0, 1, 3, 4]);
    assert!(all[3] + all[1] < 0.8 && all[3] + all[1] > 0.77);
    let top_p = |top_p| Sampling { top_p, ..base.clone() };
    check_frequencies(&logits, &top_p(0.77), &softmax(&[1, 3]));
    check_frequencies(&logits, &top_p(0.8), &softmax(&[0, 1, 3]));
    check_frequencies(&logits, &top_p(0.0), &softmax(&[3]));
    // Of three, the first two have more.
    let both = Sampling { top_k: 3, top_p: 0.8, ..base.clone() };
    check_frequencies(&logits, &both, &softmax(&[1, 3]));
    // Relative to the most likely one: 1, 0.51, 0.26, 0.14.
    let min_p = Sampling { min_p: 0.25, ..base.clone() };
    check_frequencies(&logits, &min_p, &softmax(&[0, 1, 3]));
    let all = Sampling { min_p: 0.25, top_k: 2, top_p: 0.6, ..base };
    check_frequencies(&logits, &all, &softmax(&[3]));
}

fn noise(len: usize, seed: u32, spread: f32) -> Vec<f32> {
    (0..len as u32)
        .map(|i| {
            let x = (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)) >> 8;
            ((x % 10_007) as f32 / 10_007.0 - 0.5) * spread
        })
        .collect()
}

fn samplings() -> Vec<Sampling> {
    let base = Sampling { temperature: 0.8, seed: 5, ..Sampling::GREEDY };
    let bias = vec![(TokenId(3), 4.0), (TokenId(800), -100.0)];
    vec![
        Sampling::GREEDY,
        base.clone(),
        Sampling { top_k: 40, ..base.clone() },
        Sampling { top_p: 0.9, ..base.clone() },
        Sampling { min_p: 0.02, ..base.clone() },
        Sampling { top_k: 20, top_p: 0.5, min_p: 0.1, ..base.clone() },
        // More than the candidates.
        Sampling { top_k: 700, ..base.clone() },
        Sampling { top_p: 0.999, temperature: 3.0, ..base.clone() },
        Sampling { min_p: 0.000_001, ..base.clone() },
        Sampling { repetition_penalty: 1.3, logit_bias: bias, ..Sampling::GREEDY },
        Sampling { presence_penalty: 0.5, frequency_penalty: 0.3, ..base },
    ]
}

/// Rows of every kind, chosen by ranks that hold parts of the vocabulary.
#[test]
fn any_number_of_ranks_samples_the_same_tokens() {
    let vocab = 900;
    let mut mask = TokenMask::all(vocab as u32);
    (0..vocab as u32).step_by(3).for_each(|token| mask.forbid(TokenId(token)));
    let samplers: Vec<_> = samplings()
        .into_iter()
        .map(|sampling| {
            let params = SamplingParams {
                logprobs: Some(4),
                prompt_len: 10,
                forbidden: vec![5, 899],
                forbidden_before: 60,
                ..params_of(sampling)
            };
            let mut sampler = Sampler::new(params);
            sampler.take(0, &(0..50).map(|i| i * 17 % 900).collect::<Vec<_>>());
            sampler
        })
        .collect();
    let rows: Vec<_> = (0..samplers.len() * 6)
        .map(|i| Row {
            sampler: &samplers[i % samplers.len()],
            index: 50 + i as u32,
            drafts: &[],
            mask: (i % 4 == 1).then_some(&mask),
        })
        .collect();
    let logits: Vec<f32> = (0..rows.len()).flat_map(|i| noise(vocab, i as u32, 16.0)).collect();
    let run = |cuts: &[usize]| {
        let bounds = [&[0], cuts, &[vocab]].concat();
        let ranges: Vec<_> = bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
        let groups = thread_groups(ranges.len() as u32, 1);
        thread::scope(|scope| {
            let threads: Vec<_> = groups
                .iter()
                .zip(&ranges)
                .map(|(group, range)| {
                    let (ranges, logits, rows) = (&ranges, &logits, &rows);
                    scope.spawn(move || {
                        let part: Vec<f32> = logits
                            .chunks(vocab)
                            .flat_map(|row| &row[range.clone()])
                            .copied()
                            .collect();
                        let logits = Logits {
                            chosen: Vec::new(),
                            values: &part,
                            range: range.clone(),
                            ranges: Some(ranges),
                            vocab_size: vocab,
                        };
                        let ranks = Ranks::all(group.as_ref(), TIMEOUT);
                        sample(&logits, rows, &ranks).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let alone = run(&[]).remove(0);
    for (row, chosen) in rows.iter().zip(&alone) {
        let token = chosen.token.unwrap();
        assert!(row.mask.is_none_or(|mask| mask.is_allowed(TokenId(token))));
        assert!(row.index >= 60 || ![5, 899].contains(&token));
    }
    let tokens = |chosen: &[SampledToken]| chosen.iter().map(|it| it.token).collect::<Vec<_>>();
    for cuts in [&[450][..], &[1, 600], &[0, 300, 300]] {
        let ranks = run(cuts);
        assert!(ranks.iter().all(|chosen| *chosen == ranks[0]), "ranks agree");
        assert_eq!(tokens(&ranks[0]), tokens(&alone), "{cuts:?}");
    }
}

#[test]
fn logprobs_are_those_of_the_model() {
    let logits = [1.0, 3.0, 2.0, -1.0, 2.0];
    let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let logprob = |token: usize| (f64::from(logits[token]).exp() / total).ln() as f32;
    let bias = vec![(TokenId(3), 50.0)];
    let sampling = Sampling { logit_bias: bias, ..Sampling::GREEDY };
    let sampler = Sampler::new(SamplingParams { logprobs: Some(3), ..params_of(sampling) });
    let chosen = sample_row(&logits, &sampler, 0, None);
    assert_eq!(chosen.token, Some(3));
    let found = chosen.logprobs.unwrap();
    // Two roundings of an f32.
    let near = |a: f32, b: f32| (a - b).abs() < 1e-6;
    assert!(near(found.logprob, logprob(3)), "{found:?}");
    let order: Vec<_> = found.top.iter().map(|(token, _)| token.0).collect();
    assert_eq!(order, [1, 2, 4]);
    assert!(found.top.iter().all(|(token, it)| near(*it, logprob(token.0 as usize))));
    let sampler = Sampler::new(SamplingParams { logprobs: Some(0), ..params_of(Sampling::GREEDY) });
    let lost = [0.0, f32::NEG_INFINITY];
    let mut mask = TokenMask::none(2);
    mask.allow(TokenId(1));
    let found = sample_row(&lost, &sampler, 0, Some(&mask));
    assert_eq!(found.token, Some(1));
    assert_eq!(found.logprobs.unwrap().logprob, shardpack_engine_api::MIN_LOGPROB);
}

#[test]
fn penalties_count_prompt_and_answer_as_documented() {
    let penalised = |sampling: Sampling| {
        let mut sampler = Sampler::new(SamplingParams { prompt_len: 2, ..params_of(sampling) });
        sampler.take(0, &[0, 1]);
        sampler.take(2, &[1, 2, 2]);
        let row = Row { sampler: &sampler, index: 5, drafts: &[], mask: None };
        row.adjusted(&[1.0, -1.0, 2.0, 4.0], 0).into_owned()
    };
    let base = Sampling::GREEDY;
    assert_eq!(
        penalised(Sampling { repetition_penalty: 2.0, ..base.clone() }),
        [0.5, -2.0, 1.0, 4.0]
    );
    assert_eq!(
        penalised(Sampling { presence_penalty: 0.5, ..base.clone() }),
        [1.0, -1.5, 1.5, 4.0]
    );
    assert_eq!(
        penalised(Sampling { frequency_penalty: 0.5, ..base.clone() }),
        [1.0, -1.5, 1.0, 4.0]
    );
    let bias = vec![(TokenId(2), 1.0), (TokenId(3), -6.0)];
    let all = Sampling { repetition_penalty: 2.0, logit_bias: bias, ..base };
    assert_eq!(penalised(all), [0.5, -2.0, 1.5, -2.0]);
}

#[test]
fn candidates_of_other_ranks_are_validated() {
    let sampler = Sampler::new(SamplingParams {
        logprobs: Some(2),
        ..params_of(Sampling { temperature: 1.0, top_p: 0.5, ..Sampling::GREEDY })
    });
    let row = Row { sampler: &sampler, index: 0, drafts: &[], mask: None };
    let logits = noise(20, 3, 4.0);
    let mut bytes = Vec::new();
    let part = ShardCandidates::of(&row, &logits, 100);
    part.encode(&row, &mut bytes);
    let parse = |bytes: &[u8], range| {
        let mut rest = bytes;
        ShardCandidates::parse(&row, &range, &mut rest).filter(|_| rest.is_empty())
    };
    assert_eq!(parse(&bytes, 100..120), Some(part));
    assert_eq!(parse(&bytes, 101..120), None, "tokens of another rank");
    for len in 0..bytes.len() {
        assert_eq!(parse(&bytes[..len], 100..120), None, "{len} bytes");
    }
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0xff;
        let _ = parse(&changed, 100..120);
    }
}
