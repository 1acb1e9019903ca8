//! Speculative decoding: the same requests with and without drafts, in turns.

use std::{
    collections::BTreeMap,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;
use shardpack_collectives::Group;
use shardpack_engine_api::{Event, GenerateRequest, RequestId, Sampling, TokenId};

use super::{BenchError, Workload};
use crate::{
    backend::Cpu,
    engine::{Engine, RankEngine, Speculate, StepOutcome},
};

/// Turns of each measurement; the median counts.
const TURNS: usize = 3;

/// What the answers are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerKind {
    /// Sampled at a temperature of 1: new text, as far as the model allows.
    New,
    /// The most likely tokens, which small and untrained models repeat.
    Likely,
    /// Predicted by the client word for word, like a file that is rewritten (predicted outputs).
    #[serde(rename = "foretold")]
    Predicted,
}

/// Speed with and without drafts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DraftSpeed {
    /// What the answers were like.
    pub text: AnswerKind,
    /// Tokens of each prompt.
    pub context: usize,
    /// Requests at a time.
    pub batch: usize,
    /// Tokens per second after the first ones, without drafts.
    pub off_tokens_per_second: f64,
    /// The same with drafts.
    pub auto_tokens_per_second: f64,
    /// Draft tokens that were run for each token of the answers.
    pub drafted_per_token: f64,
    /// Acceptance rate: accepted drafts of all drafts that were run.
    pub accepted_share: f64,
}

/// Runs each load with answers of each kind on the engines of one group, rank 0's first, without
/// drafts and with them. Answers that differ are an error.
pub fn bench_drafts(
    engines: &mut [Engine<Cpu>],
    groups: &[Arc<dyn Group>],
    loads: &[Workload],
) -> Result<Vec<DraftSpeed>, BenchError> {
    let (leader, followers) = engines.split_first_mut().expect("a group has at least one rank");
    thread::scope(|scope| {
        for (engine, group) in followers.iter_mut().zip(&groups[1..]) {
            // It ends with the group, whose error the leader sees too.
            scope.spawn(move || while engine.follow(group.as_ref()).is_ok() {});
        }
        let group = groups[0].as_ref();
        let mut next_id = 0;
        let texts = [AnswerKind::New, AnswerKind::Likely, AnswerKind::Predicted];
        let speeds = loads
            .iter()
            .flat_map(|load| texts.map(|text| (*load, text)))
            .map(|(load, text)| compare(leader, group, (load, text), &mut next_id))
            .collect();
        group.abort("the measurement is over");
        speeds
    })
}

/// Answers, and how they came.
struct Run {
    answers: BTreeMap<u64, Vec<TokenId>>,
    tokens_per_second: f64,
    drafted: u32,
    accepted: u32,
}

fn compare(
    leader: &mut Engine<Cpu>,
    group: &dyn Group,
    (load, text): (Workload, AnswerKind),
    next_id: &mut u64,
) -> Result<DraftSpeed, BenchError> {
    let (mut off, mut auto) = (Vec::new(), Vec::new());
    let mut answers: Option<BTreeMap<u64, Vec<TokenId>>> = None;
    let (mut drafted, mut accepted) = (0, 0);
    for _ in 0..TURNS {
        for (when, speeds) in [(Speculate::Off, &mut off), (Speculate::Auto, &mut auto)] {
            leader.speculate(when);
            let run = run(leader, group, (load, text), answers.as_ref(), next_id)?;
            speeds.push(run.tokens_per_second);
            (drafted, accepted) = (drafted + run.drafted, accepted + run.accepted);
            if answers.get_or_insert_with(|| run.answers.clone()) != &run.answers {
                let message = "answers with drafts differ from those without".to_owned();
                return Err(BenchError::Request(message));
            }
        }
    }
    leader.speculate(Speculate::Off);
    let tokens = (TURNS * load.batch * load.generate) as f64;
    Ok(DraftSpeed {
        text,
        context: load.context,
        batch: load.batch,
        off_tokens_per_second: median(&mut off),
        auto_tokens_per_second: median(&mut auto),
        drafted_per_token: f64::from(drafted) / tokens,
        accepted_share: f64::from(accepted) / f64::from(drafted.max(1)),
    })
}

fn median(speeds: &mut [f64]) -> f64 {
    speeds.sort_by(f64::total_cmp);
    speeds.get(speeds.len() / 2).copied().unwrap_or_default()
}

fn run(
    leader: &mut Engine<Cpu>,
    group: &dyn Group,
    (load, text): (Workload, AnswerKind),
    predictions: Option<&BTreeMap<u64, Vec<TokenId>>>,
    next_id: &mut u64,
) -> Result<Run, BenchError> {
    let first_id = *next_id;
    *next_id += load.batch as u64;
    let vocab = leader.model().spec().vocab_size;
    for number in 0..load.batch as u64 {
        let request = request(vocab, (load, text), number, predictions);
        leader.submit(RequestId(first_id + number), request);
    }
    let mut answers: BTreeMap<u64, Vec<TokenId>> = BTreeMap::new();
    let (mut drafted, mut accepted, mut failure) = (0, 0, None);
    // From when every request has a token.
    let mut begun: Option<(Instant, usize)> = None;
    let (mut elapsed, mut counted) = (Duration::ZERO, 0);
    loop {
        let outcome = leader.lead(group, &mut |event| match event {
            Event::Token { request, token, .. } => {
                answers.entry(request.0 - first_id).or_default().push(token);
            }
            Event::Finished { usage, .. } => {
                drafted += usage.drafted_tokens;
                accepted += usage.accepted_tokens;
            }
            Event::PromptLogprobs { .. } | Event::Embedding { .. } => {}
            Event::Failed { message, .. } => failure = Some(message),
        })?;
        if let Some(message) = failure {
            return Err(BenchError::Request(message));
        }
        if outcome == StepOutcome::Idle {
            break;
        }
        let tokens = answers.values().map(Vec::len).sum::<usize>();
        match begun {
            None if answers.len() == load.batch => begun = Some((Instant::now(), tokens)),
            Some((start, before)) => (elapsed, counted) = (start.elapsed(), tokens - before),
            None => {}
        }
    }
    let tokens_per_second = counted as f64 / elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
    Ok(Run { answers, tokens_per_second, drafted, accepted })
}

/// One of a load's requests: the same in every turn.
fn request(
    vocab: u32,
    (load, text): (Workload, AnswerKind),
    number: u64,
    predictions: Option<&BTreeMap<u64, Vec<TokenId>>>,
) -> GenerateRequest {
    let token = |index: usize| {
        let mixed = ((number + 1) << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        TokenId(((mixed >> 33) % u64::from(vocab)) as u32)
    };
    let prompt = (0..load.context).map(token).collect();
    let mut request = GenerateRequest::greedy(prompt, load.generate as u32 + 1);
    match text {
        AnswerKind::New => {
            request.sampling = Sampling { temperature: 1.0, seed: number, ..Sampling::GREEDY };
        }
        AnswerKind::Likely => {}
        AnswerKind::Predicted => {
            let predictions = predictions.and_then(|answers| answers.get(&number));
            request.prediction = predictions.cloned().unwrap_or_default();
        }
    }
    request
}

#[cfg(test)]
mod tests {
    use super::{super::tests::engines, *};
    use crate::engine::memory_group;

    #[test]
    fn predicted_outputs_are_drafted_and_new_text_hardly() {
        let mut engines = engines();
        let load = |batch| Workload { context: 5, batch, generate: 40 };
        let groups = memory_group(2).unwrap();
        let speeds = bench_drafts(&mut engines, &groups, &[load(1), load(3)]).unwrap();
        let texts: Vec<_> = speeds.iter().map(|speed| (speed.batch, speed.text)).collect();
        let each = [AnswerKind::New, AnswerKind::Likely, AnswerKind::Predicted];
        assert_eq!(texts, [1, 3].map(|batch| each.map(|text| (batch, text))).concat());
        for speed in speeds {
            assert!(speed.off_tokens_per_second > 0.0 && speed.auto_tokens_per_second > 0.0);
            if speed.text == AnswerKind::Predicted {
                assert!(speed.drafted_per_token > 0.3, "{speed:?}");
                assert!(speed.accepted_share > 0.9, "{speed:?}");
            } else if speed.text == AnswerKind::New {
                assert!(speed.drafted_per_token < 0.2, "{speed:?}");
            }
        }
    }
}
