//! The requests of a group, with what each has got so far: enough to go on in another group. No I/O.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use shardpack_engine_api::{
    Event, EventSink, FinishReason, GenerateRequest, PromptOutput, RequestId, TokenId, Usage,
};

/// Losses without a token between them after which a request is not tried again: it may be what ends
/// the ranks.
const MAX_LOSSES: u32 = 3;

/// The requests between their submission and their end.
#[derive(Default)]
pub(super) struct Requests(BTreeMap<RequestId, Request>);

struct Request {
    /// As it was submitted.
    asked: Box<GenerateRequest>,
    events: EventSink,
    /// Tokens that its submitter has.
    generated: Vec<TokenId>,
    /// Tokens of the prompt whose log probabilities its submitter has, the first one counted as such.
    scored: u32,
    submitted: Instant,
    /// Whether rank 0 has it.
    is_sent: bool,
    /// Losses while rank 0 had it, since its last token.
    losses: u32,
}

impl Requests {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn contains(&self, id: RequestId) -> bool {
        self.0.contains_key(&id)
    }

    pub(super) fn insert(
        &mut self,
        id: RequestId,
        request: Box<GenerateRequest>,
        events: EventSink,
    ) {
        let request = Request {
            asked: request,
            events,
            generated: Vec::new(),
            scored: 1,
            submitted: Instant::now(),
            is_sent: false,
            losses: 0,
        };
        self.0.insert(id, request);
    }

    /// Those that rank 0 does not have, in the order of their submission.
    pub(super) fn unsent(&self) -> Vec<RequestId> {
        let unsent = self.0.iter().filter(|(_, request)| !request.is_sent);
        unsent.map(|(id, _)| *id).collect()
    }

    /// What rank 0 is to be sent: what is left of the request and of its time.
    pub(super) fn take_to_send(&mut self, id: RequestId) -> Option<Box<GenerateRequest>> {
        let held = self.0.get_mut(&id)?;
        held.is_sent = true;
        let mut request = held.asked.clone();
        request.generated.clone_from(&held.generated);
        if !held.generated.is_empty() {
            // Of the prompt its submitter has everything.
            request.prompt_output = PromptOutput::Nothing;
        }
        let passed = u64::try_from(held.submitted.elapsed().as_millis()).unwrap_or(u64::MAX);
        request.timeout_ms = request.timeout_ms.map(|most| most.saturating_sub(passed));
        Some(request)
    }

    /// Passes an event on; one of a request that has ended is dropped. Returns whether one has ended.
    pub(super) fn pass(&mut self, event: Event) -> Option<Ended> {
        let id = event.request();
        let request = self.0.get_mut(&id)?;
        match event {
            Event::Token { token, .. } => {
                request.generated.push(token);
                request.losses = 0;
            }
            Event::PromptLogprobs { request: id, first, mut logprobs } => {
                let known = request.scored.saturating_sub(first).min(logprobs.len() as u32);
                logprobs.drain(..known as usize);
                let first = first + known;
                request.scored = request.scored.max(first + logprobs.len() as u32);
                if !logprobs.is_empty() {
                    (request.events)(Event::PromptLogprobs { request: id, first, logprobs });
                }
                return None;
            }
            Event::Embedding { .. } | Event::Finished { .. } | Event::Failed { .. } => {}
        }
        if matches!(event, Event::Finished { .. } | Event::Failed { .. }) {
            return self.0.remove(&id).map(|request| Ended { events: request.events, event });
        }
        (request.events)(event);
        None
    }

    /// Rank 0 has none of them any more. Those that may be what ends the ranks are failed with
    /// `message`.
    pub(super) fn interrupt(&mut self, message: &str) -> Vec<Ended> {
        for request in self.0.values_mut().filter(|request| request.is_sent) {
            request.is_sent = false;
            request.losses += 1;
        }
        let message = format!("{message}, {MAX_LOSSES} times without a token of this request");
        self.fail_where(&message, |request| request.losses >= MAX_LOSSES)
    }

    /// Ends a request that rank 0 does not have.
    pub(super) fn finish_unsent(&mut self, id: RequestId, reason: FinishReason) -> Option<Ended> {
        let is_unsent = self.0.get(&id).is_some_and(|request| !request.is_sent);
        is_unsent.then(|| self.0.remove(&id))?.map(|request| request.finish(id, reason))
    }

    /// Ends those whose time is over while no rank 0 has them.
    pub(super) fn expire_unsent(&mut self) -> Vec<Ended> {
        let is_late = |request: &Request| {
            let most = request.asked.timeout_ms.map(Duration::from_millis);
            most.is_some_and(|most| request.submitted.elapsed() >= most)
        };
        let late = self.0.iter().filter(|(_, request)| !request.is_sent && is_late(request));
        let late: Vec<RequestId> = late.map(|(id, _)| *id).collect();
        let end = |id| self.finish_unsent(id, FinishReason::Deadline);
        late.into_iter().filter_map(end).collect()
    }

    /// Fails all.
    pub(super) fn fail(&mut self, message: &str) -> Vec<Ended> {
        self.fail_where(message, |_| true)
    }

    /// Fails one, which the same request would not mend.
    pub(super) fn refuse(&mut self, id: RequestId, message: String) -> Option<Ended> {
        let event = Event::Failed { request: id, message, retryable: false };
        self.0.remove(&id).map(|request| Ended { events: request.events, event })
    }

    fn fail_where(&mut self, message: &str, fails: impl Fn(&Request) -> bool) -> Vec<Ended> {
        let failing = self.0.iter().filter(|(_, request)| fails(request));
        let failing: Vec<RequestId> = failing.map(|(id, _)| *id).collect();
        let end = |(id, request): (RequestId, Request)| {
            let event = Event::Failed { request: id, message: message.to_owned(), retryable: true };
            Ended { events: request.events, event }
        };
        failing.into_iter().filter_map(|id| self.0.remove_entry(&id)).map(end).collect()
    }
}

impl Request {
    fn finish(self, id: RequestId, reason: FinishReason) -> Ended {
        let usage = Usage {
            prompt_tokens: self.asked.prompt.len() as u32,
            completion_tokens: self.generated.len() as u32,
            ..Usage::default()
        };
        Ended { events: self.events, event: Event::Finished { request: id, reason, usage } }
    }
}

/// A request that has ended, with its last event, which is passed on once the status says so too: a
/// client that sees the end looks there.
#[must_use]
pub(super) struct Ended {
    events: EventSink,
    event: Event,
}

impl Ended {
    /// Passes the last event on.
    pub(super) fn tell(self) {
        (self.events)(self.event);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use shardpack_engine_api::TokenLogprobs;

    use super::*;

    const ID: RequestId = RequestId(1);

    fn submitted(request: GenerateRequest) -> (Requests, Arc<Mutex<Vec<Event>>>) {
        let events = Arc::<Mutex<Vec<Event>>>::default();
        let sink = Arc::clone(&events);
        let mut requests = Requests::default();
        requests.insert(ID, Box::new(request), Box::new(move |it| sink.lock().unwrap().push(it)));
        (requests, events)
    }

    fn token(token: u32) -> Event {
        Event::Token { request: ID, token: TokenId(token), logprobs: None }
    }

    #[test]
    fn a_request_goes_on_with_the_tokens_that_its_submitter_has() {
        let request = GenerateRequest {
            prompt_output: PromptOutput::Logprobs(0),
            timeout_ms: Some(60_000),
            ..GenerateRequest::greedy(vec![TokenId(1); 4], 9)
        };
        let (mut requests, events) = submitted(request.clone());
        assert_eq!(requests.unsent(), [ID]);
        let sent = requests.take_to_send(ID).unwrap();
        assert_eq!((&sent.generated, sent.prompt_output), (&vec![], PromptOutput::Logprobs(0)));
        assert!(requests.unsent().is_empty());
        let logprobs = |first: u32, values: &[f32]| Event::PromptLogprobs {
            request: ID,
            first,
            logprobs: values.iter().map(|it| TokenLogprobs { logprob: *it, top: vec![] }).collect(),
        };
        assert!(requests.pass(logprobs(1, &[-1.0])).is_none());
        assert!(requests.interrupt("rank 1 is lost").is_empty());
        assert_eq!(requests.unsent(), [ID]);
        requests.take_to_send(ID).unwrap();
        // Computed again from the beginning, and told from where it was.
        assert!(requests.pass(logprobs(1, &[-1.0, -2.0, -3.0])).is_none());
        assert!(requests.pass(token(7)).is_none());
        assert!(requests.interrupt("rank 1 is lost").is_empty());
        let sent = requests.take_to_send(ID).unwrap();
        assert_eq!((sent.generated, sent.prompt_output), (vec![TokenId(7)], PromptOutput::Nothing));
        assert!(sent.timeout_ms.is_some_and(|left| left > 50_000));
        let usage = Usage { completion_tokens: 2, ..Usage::default() };
        let reason = FinishReason::Length;
        requests.pass(Event::Finished { request: ID, reason, usage }).unwrap().tell();
        assert_eq!(requests.len(), 0);
        let expected = [
            logprobs(1, &[-1.0]),
            logprobs(2, &[-2.0, -3.0]),
            token(7),
            Event::Finished { request: ID, reason, usage },
        ];
        assert_eq!(*events.lock().unwrap(), expected);
    }

    #[test]
    fn a_request_that_may_end_the_ranks_is_given_up() {
        let (mut requests, events) = submitted(GenerateRequest::greedy(vec![TokenId(1)], 9));
        // While rank 0 does not have it, no loss is of its making.
        (0..9).for_each(|_| assert!(requests.interrupt("lost").is_empty()));
        let lose = |requests: &mut Requests| {
            requests.take_to_send(ID);
            requests.interrupt("lost").into_iter().for_each(Ended::tell);
        };
        (0..2).for_each(|_| lose(&mut requests));
        requests.take_to_send(ID);
        assert!(requests.pass(token(7)).is_none());
        assert!(requests.interrupt("lost").is_empty());
        lose(&mut requests);
        assert_eq!(requests.len(), 1);
        lose(&mut requests);
        assert_eq!(requests.len(), 0);
        let message = "lost, 3 times without a token of this request".to_owned();
        let failed = Event::Failed { request: ID, message, retryable: true };
        assert_eq!(events.lock().unwrap().last(), Some(&failed));
    }

    #[test]
    fn requests_that_wait_keep_their_deadlines_and_can_be_cancelled() {
        for (timeout_ms, reason) in
            [(Some(0), FinishReason::Deadline), (None, FinishReason::Cancelled)]
        {
            let request =
                GenerateRequest { timeout_ms, ..GenerateRequest::greedy(vec![TokenId(1)], 9) };
            let (mut requests, events) = submitted(request);
            requests.expire_unsent().into_iter().for_each(Ended::tell);
            let cancelled = requests.finish_unsent(ID, FinishReason::Cancelled);
            cancelled.into_iter().for_each(Ended::tell);
            let usage = Usage { prompt_tokens: 1, ..Usage::default() };
            let expected = Event::Finished { request: ID, reason, usage };
            assert_eq!(*events.lock().unwrap(), [expected]);
        }
    }
}
