package usertimeout

import (
	"net"
	"testing"
	"time"
)

func TestConnectionsHaveTheTimeout(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := net.Dialer{Control: Control(7 * time.Second)}
	conn, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := Of(conn.(*net.TCPConn)); err != nil || got != 7*time.Second {
		t.Errorf("TCP_USER_TIMEOUT is %s: %v", got, err)
	}
}
