//! The server's connections: how many there may be, and which of them gives way.
//!
//! A connection without a request under way is idle: it has not finished its handshake, or the head or the
//! body of its first request, or it is kept for the next one. When all places are taken, the idle connection that
//! has waited longest gives way to the new one, of the address that has most of them; one that has not
//! said a word before all others, and one with a part of a message before those with a whole one. A
//! request under way is never cut off. So connections that say nothing, or trickle, cost an honest
//! caller nothing, however many there are.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, Incoming, SizeHint};
use rustix::process::{Resource, getrlimit};
use tokio::sync::Notify;

/// Descriptors that are kept for ranks, files and whoever looks after the server.
const RESERVED_DESCRIPTORS: u64 = 96;

/// Fewest places, however few descriptors there are.
const LEAST: u64 = 16;

/// How long a connection has its place at least: time enough for a handshake and a head that are sent
/// at once, however many others come meanwhile. These wait to be accepted.
const LEAST_IDLE: Duration = Duration::from_millis(50);

/// The same for a connection of whose message a part has come, the body included. What follows is on
/// its way.
const LEAST_PART: Duration = Duration::from_millis(10);

/// The same for a connection that has not said a word, but for a newcomer that has. A client's first
/// bytes follow its last packet of TCP's handshake at once, so they are there when the connection is
/// accepted, or a moment later.
const LEAST_SILENT: Duration = Duration::from_millis(2);

/// What has come from a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Said {
    Nothing,
    /// A part of its first message.
    Part,
    /// A whole message: what it is about to do is known.
    Message,
}

/// The open connections of a server.
pub(super) struct Connections {
    most: usize,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    /// Number of the next connection.
    next: u64,
    open: BTreeMap<u64, Place>,
}

struct Place {
    address: IpAddr,
    /// Requests under way, and how many of them have yet to send their body.
    running: u32,
    receiving: u32,
    said: Said,
    /// Since when it has been idle, or nothing has come of a body.
    idle_since: Instant,
    gives_way: Arc<Notify>,
}

impl Connections {
    /// At most `most`, and no more than this process's descriptors allow.
    pub(super) fn new(most: usize) -> Arc<Self> {
        let allowed = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |descriptors| {
            descriptors.saturating_sub(RESERVED_DESCRIPTORS).max(LEAST)
        });
        let most = most.min(usize::try_from(allowed).unwrap_or(usize::MAX)).max(1);
        Arc::new(Self { most, places: Mutex::default() })
    }

    /// A place for a connection that has said so much, taken from an idle one where there is none.
    pub(super) fn enter(
        self: &Arc<Self>,
        address: IpAddr,
        said: Said,
    ) -> Result<Arc<Entered>, NoPlace> {
        let mut places = self.lock();
        if places.open.len() >= self.most {
            places.make_room(said, Instant::now())?;
        }
        let number = places.next;
        places.next += 1;
        let gives_way = Arc::new(Notify::new());
        let (idle_since, told) = (Instant::now(), Arc::clone(&gives_way));
        places.open.insert(number, Place::new(address, said, idle_since, gives_way));
        drop(places);
        Ok(Arc::new(Entered { connections: Arc::clone(self), number, gives_way: told }))
    }

    /// Has an idle connection give way, if there is one: the system has no descriptor left.
    pub(super) fn make_room(&self) {
        let _ = self.lock().make_room(Said::Message, Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why there is no place for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// A request is under way on every connection.
    Full,
    /// The one that gives way next has it since a moment ago.
    Later(Duration),
}

impl Place {
    const fn new(address: IpAddr, said: Said, idle_since: Instant, gives_way: Arc<Notify>) -> Self {
        Self { address, running: 0, receiving: 0, said, idle_since, gives_way }
    }

    const fn is_idle(&self) -> bool {
        self.running == self.receiving
    }

    /// What has come of the message that is expected of it.
    fn said(&self) -> Said {
        if self.receiving > 0 { Said::Part } else { self.said }
    }

    /// Until when it keeps its place, whoever has said so much wants it.
    fn kept_until(&self, newcomer: Said) -> Instant {
        let least = match self.said() {
            Said::Nothing if newcomer > Said::Nothing => Duration::ZERO,
            Said::Nothing => LEAST_SILENT,
            Said::Part => LEAST_PART,
            Said::Message => LEAST_IDLE,
        };
        self.idle_since + least
    }
}

impl Places {
    fn make_room(&mut self, newcomer: Said, now: Instant) -> Result<(), NoPlace> {
        let idle = || self.open.iter().filter(|(_, place)| place.is_idle());
        let kept_until = |place: &Place| place.kept_until(newcomer);
        let soonest = idle().map(|(_, place)| kept_until(place)).min().ok_or(NoPlace::Full)?;
        if soonest > now {
            return Err(NoPlace::Later(soonest - now));
        }
        let may_go = || idle().filter(|(_, place)| kept_until(place) <= now);
        let least = may_go().map(|(_, place)| place.said()).min();
        let may_go = || may_go().filter(|(_, place)| Some(place.said()) == least);
        let mut number_of: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for (_, place) in idle() {
            *number_of.entry(place.address).or_default() += 1;
        }
        let number_of = |place: &Place| number_of.get(&place.address).copied();
        let most = may_go().filter_map(|(_, place)| number_of(place)).max();
        let longest = may_go()
            .filter(|(_, place)| number_of(place) == most)
            .min_by_key(|(_, place)| place.idle_since);
        let number = longest.map(|(number, _)| *number).ok_or(NoPlace::Full)?;
        if let Some(place) = self.open.remove(&number) {
            place.gives_way.notify_one();
        }
        Ok(())
    }
}

/// An open connection's place.
pub(super) struct Entered {
    connections: Arc<Connections>,
    number: u64,
    gives_way: Arc<Notify>,
}

impl Entered {
    /// Ready when the connection is to give way.
    pub(super) async fn gives_way(&self) {
        self.gives_way.notified().await;
    }

    /// So much has come from it.
    pub(super) fn has_said(&self, said: Said) {
        self.change(|place| place.said = place.said.max(said));
    }

    /// A request is under way until what is returned is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> Running {
        self.change(|place| {
            place.running += 1;
            place.said = Said::Message;
        });
        Running(Arc::clone(self))
    }

    /// For how long no request has been under way; nothing while one is.
    pub(super) fn idle(&self) -> Option<Duration> {
        match self.connections.lock().open.get(&self.number) {
            Some(place) if !place.is_idle() => None,
            Some(place) => Some(place.idle_since.elapsed()),
            // It gives way.
            None => Some(Duration::MAX),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Place)) {
        if let Some(place) = self.connections.lock().open.get_mut(&self.number) {
            change(place);
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.connections.lock().open.remove(&self.number);
    }
}

/// A request under way.
pub(super) struct Running(Arc<Entered>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.change(|place| {
            place.running = place.running.saturating_sub(1);
            place.idle_since = Instant::now();
        });
    }
}

/// The body of a request, which is not under way until it has come: whoever trickles computes nothing.
pub(super) struct ReceivingBody {
    body: Incoming,
    receiving: Option<Receiving>,
}

impl ReceivingBody {
    pub(super) fn new(body: Incoming, entered: &Arc<Entered>) -> Self {
        let receiving = (!body.is_end_stream()).then(|| Receiving::new(entered));
        Self { body, receiving }
    }
}

impl HttpBody for ReceivingBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.receiving = None;
        } else if let Some(receiving) = &self.receiving {
            receiving.0.change(|place| place.idle_since = Instant::now());
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body that is on its way.
struct Receiving(Arc<Entered>);

impl Receiving {
    fn new(entered: &Arc<Entered>) -> Self {
        entered.change(|place| place.receiving += 1);
        Self(Arc::clone(entered))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        self.0.change(|place| place.receiving = place.receiving.saturating_sub(1));
    }
}

/// The body of a response, whose request is under way until it was sent.
pub(super) struct RunningBody {
    pub(super) body: Body,
    pub(super) _running: Running,
}

impl HttpBody for RunningBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, thread};

    use tokio::time::timeout;

    use super::*;

    fn address(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    async fn has_lost(entered: &Entered) -> bool {
        timeout(Duration::from_millis(1), entered.gives_way()).await.is_ok()
    }

    /// How long a silent newcomer had to wait, had it come at `now`.
    fn wait(connections: &Connections, now: Instant) -> Duration {
        match connections.lock().make_room(Said::Nothing, now) {
            Err(NoPlace::Later(wait)) => wait,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn idle_connections_of_the_address_with_most_of_them_give_way() {
        let connections = Connections::new(4);
        let enter = |last| connections.enter(address(last), Said::Nothing);
        let begun = Instant::now();
        let honest = enter(1).unwrap();
        let [first, second, third] = [2, 2, 2].map(|last| enter(last).unwrap());
        for entered in [&honest, &first, &second, &third] {
            entered.has_said(Said::Message);
        }
        assert!(wait(&connections, begun) >= LEAST_IDLE, "each has its moment");
        thread::sleep(LEAST_IDLE);
        let fifth = enter(2).unwrap();
        fifth.has_said(Said::Message);
        assert!(has_lost(&first).await, "it has waited longest");
        assert!(!has_lost(&second).await && !has_lost(&honest).await);
        // A request under way stays, whoever has it.
        let running = second.begin();
        let sixth = enter(3).unwrap();
        sixth.has_said(Said::Message);
        assert!(has_lost(&third).await && !has_lost(&second).await);
        drop(running);
        thread::sleep(LEAST_IDLE);
        // Idle since then only.
        let _seventh = enter(3).unwrap();
        assert!(!has_lost(&second).await);
    }

    #[tokio::test]
    async fn those_that_have_said_nothing_give_way_first() {
        let connections = Connections::new(4);
        let enter = |last| connections.enter(address(last), Said::Nothing);
        let spoken = [1, 1, 1].map(|last| enter(last).unwrap());
        for entered in &spoken {
            entered.has_said(Said::Message);
        }
        let begun = Instant::now();
        let silent = enter(2).unwrap();
        let moment = wait(&connections, begun);
        assert!(moment >= LEAST_SILENT && moment <= LEAST_SILENT + begun.elapsed());
        thread::sleep(LEAST_IDLE);
        let _fifth = enter(3).unwrap();
        assert!(has_lost(&silent).await, "though another address has more");
        for entered in &spoken {
            assert!(!has_lost(entered).await);
        }
    }

    #[tokio::test]
    async fn parts_of_a_message_give_way_before_whole_ones() {
        let connections = Connections::new(2);
        let enter = |last| connections.enter(address(last), Said::Nothing);
        let whole = enter(1).unwrap();
        let begun = Instant::now();
        let part = enter(2).unwrap();
        whole.has_said(Said::Message);
        part.has_said(Said::Part);
        let moment = wait(&connections, begun);
        assert!(moment >= LEAST_PART && moment <= LEAST_PART + begun.elapsed());
        thread::sleep(LEAST_IDLE);
        let third = enter(3).unwrap();
        third.has_said(Said::Message);
        assert!(has_lost(&part).await && !has_lost(&whole).await);
        // Whoever has had a request is like one with a whole message.
        drop(whole);
        let fourth = enter(4).unwrap();
        drop(fourth.begin());
        thread::sleep(LEAST_IDLE);
        let _fifth = enter(5).unwrap();
        assert!(has_lost(&third).await && !has_lost(&fourth).await);
    }

    #[tokio::test]
    async fn silent_connections_give_way_at_once_to_a_newcomer_that_has_spoken() {
        let connections = Connections::new(2);
        let enter = |last, said| connections.enter(address(last), said);
        let part = enter(1, Said::Part).unwrap();
        let begun = part.begin();
        let silent = enter(2, Said::Nothing).unwrap();
        let spoken = enter(3, Said::Part).unwrap();
        assert!(has_lost(&silent).await && !has_lost(&spoken).await && !has_lost(&part).await);
        drop(begun);
    }

    #[tokio::test]
    async fn nobody_enters_where_a_request_is_under_way_on_every_connection() {
        let connections = Connections::new(2);
        let enter = |last| connections.enter(address(last), Said::Nothing);
        let held: Vec<_> = (0..2).map(|last| enter(last).unwrap()).collect();
        let running: Vec<_> = held.iter().map(Entered::begin).collect();
        assert_eq!(enter(9).err(), Some(NoPlace::Full));
        drop(running);
        thread::sleep(LEAST_IDLE);
        assert!(enter(9).is_ok());
        drop(held);
        assert_eq!(connections.lock().open.len(), 0, "those that are gone have no place");
    }
}
