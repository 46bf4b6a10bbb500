package storage

import (
	"net"
	"testing"

	"watershed.dev/platform/usertimeout"
)

// Calls to a lost host end also if members closes no connection, because no member of the cluster has a leader.
func TestConnectionsToMembersHaveAUserTimeout(t *testing.T) {
	_, servers := startMembers(t, 1)
	m := newMembers()
	cluster, err := m.open(servers, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = closeAll(cluster) })
	conn, err := m.dialer(nil)(t.Context(), "tcp", cluster[0].address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := usertimeout.Of(conn.(*memberConn).Conn.(*net.TCPConn)); err != nil || got != keepaliveTimeout {
		t.Errorf("TCP_USER_TIMEOUT is %s: %v", got, err)
	}
}
