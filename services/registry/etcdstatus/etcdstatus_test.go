package etcdstatus_test

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/services/registry/etcdstatus"
	"watershed.dev/services/registry/internal/fixture"
)

// The state of an etcd has its member, its revision and no alarm. Without a response it has errors.
func TestRead(t *testing.T) {
	store := fixture.New(t).Resources.Storage
	s := etcdstatus.Read(t.Context(), store.Client.Client, store.OwnKey("nothing"))
	if s.Error != "" || s.Revision == 0 || s.Voting != 1 || len(s.Alarms) != 0 || len(s.Servers) != 1 {
		t.Errorf("%+v", s)
	}
	if m := s.Members[0]; m.Error != "" || !m.Leader || !m.HasLeader || m.Version == "" || m.Bytes == 0 || m.Name == "" {
		t.Errorf("%+v", m)
	}
	_, err := etcdstatus.Program(t.Context(), store.Client.Client, store.Client.Endpoints()[0])
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("the report of an etcd that is not Watershed's: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if s := etcdstatus.Read(ctx, store.Client.Client, "x"); s.Error == "" || s.Members[0].Error == "" || s.Voting != 0 {
		t.Errorf("without a response: %+v", s)
	}
}
