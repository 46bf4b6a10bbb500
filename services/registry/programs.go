package registry

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/process"
	"watershed.dev/services/registry/etcdstatus"
)

// programs returns the reports of the processes of etcd and NATS. Only Watershed's own programs have reports.
func (s *Service) programs(ctx context.Context) (all []*process.Report) {
	ctx, cancel := context.WithTimeout(ctx, etcdstatus.Timeout)
	defer cancel()
	var mu sync.Mutex
	add := func(r *process.Report) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, r)
	}
	var wg sync.WaitGroup
	for _, etcd := range s.resources.Storage.Etcds() {
		for _, endpoint := range etcd.Client.Endpoints() {
			wg.Go(func() {
				if r, err := etcdstatus.Program(ctx, etcd.Client.Client, endpoint); err == nil {
					add(r)
				}
			})
		}
	}
	wg.Go(func() {
		sent := time.Now()
		err := eventlog.Reports(ctx, s.nats, func(report []byte) {
			if r, err := process.DecodeProgram("nats", report, sent, time.Now()); err == nil {
				add(r)
			}
		})
		if err != nil {
			slog.Debug("The reports of NATS cannot be read", "error", err)
		}
	})
	wg.Wait()
	return all
}
