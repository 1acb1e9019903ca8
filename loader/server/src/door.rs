//! The door: new connections get a place, wait for one, or are closed.
//!
//! Nobody waits behind one that says nothing. When all places are taken, a newcomer whose first message is
//! there takes that of a silent connection, or waits until one becomes free, and the others with it; one
//! without waits beside the door, where there is room for a few.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep},
};

use super::{
    connections::{Connections, Entered, NoPlace, Said},
    http2,
};

/// How many wait beside the door; their descriptors are among those that are kept in reserve.
const WAIT_BESIDE: usize = 16;

/// How long, at most: longer than any idle connection keeps its place.
const WAIT: Duration = Duration::from_millis(100);

/// Pause before one beside the door is looked at again.
const PAUSE: Duration = Duration::from_millis(1);

pub(super) struct Door {
    connections: Arc<Connections>,
    beside: Arc<Semaphore>,
    over_tls: bool,
}

/// What becomes of a new connection.
pub(super) enum Admitted {
    /// It has a place.
    Entered(Arc<Entered>),
    /// It waits beside the door.
    Waits(OwnedSemaphorePermit),
}

impl Door {
    pub(super) fn new(connections: Arc<Connections>, over_tls: bool) -> Self {
        Self { connections, beside: Arc::new(Semaphore::new(WAIT_BESIDE)), over_tls }
    }

    /// Admits a connection, or nothing: it is to be closed.
    pub(super) async fn admit(&self, connection: &TcpStream, address: IpAddr) -> Option<Admitted> {
        loop {
            let said = http2::said(connection, self.over_tls);
            match self.connections.enter(address, said) {
                Ok(entered) => return Some(Admitted::Entered(entered)),
                Err(NoPlace::Later(wait)) if said == Said::Message => sleep(wait).await,
                Err(NoPlace::Later(_)) => {
                    let permit = Arc::clone(&self.beside).try_acquire_owned();
                    return permit.ok().map(Admitted::Waits);
                }
                Err(NoPlace::Full) => return None,
            }
        }
    }

    /// A place for one that waited beside the door, or nothing: it is to be closed.
    pub(super) async fn enter_from_beside(
        &self,
        connection: &TcpStream,
        address: IpAddr,
        _permit: OwnedSemaphorePermit,
    ) -> Option<Arc<Entered>> {
        let until = Instant::now() + WAIT;
        loop {
            match self.connections.enter(address, http2::said(connection, self.over_tls)) {
                Ok(entered) => return Some(entered),
                Err(NoPlace::Later(wait)) if Instant::now() < until => sleep(wait.min(PAUSE)).await,
                Err(_) => return None,
            }
        }
    }

    /// Has an idle connection give way, if there is one: the system has no descriptor left.
    pub(super) fn make_room(&self) {
        self.connections.make_room();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{self, Ipv4Addr};

    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_silent_newcomer_waits_beside_the_door() {
        let address = Ipv4Addr::LOCALHOST.into();
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let _client = net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (connection, _) = listener.accept().await.unwrap();
        // On a busy machine the idle connection's moment may be over before the newcomer asks.
        for _ in 0..20 {
            let connections = Connections::new(1);
            let door = Door::new(Arc::clone(&connections), false);
            let first = connections.enter(address, Said::Message).unwrap();
            let running = first.begin();
            assert!(door.admit(&connection, address).await.is_none(), "nobody gives way");
            // Idle since now.
            drop(running);
            if let Some(Admitted::Waits(permit)) = door.admit(&connection, address).await {
                assert!(door.enter_from_beside(&connection, address, permit).await.is_some());
                assert_eq!(door.beside.available_permits(), WAIT_BESIDE);
                return;
            }
        }
        panic!("it never waited");
    }
}
