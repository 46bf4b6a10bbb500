package main

// Edits that remove a defence in depth, or let a fault happen.
var (
	// ownStreams gives each watch a stream of its own: no broadcast drops the events that it has.
	ownStreams = edit{
		file:    "platform/watchcache/core/watch.go",
		code:    "	return w.Positioned && (!asTable || w.request.ColumnsSent)\n",
		instead: "	return false && !asTable\n",
	}
	// noSkip makes a replica send events that the watch has.
	noSkip = edit{
		file:    "platform/watchcache/watch/watcher.go",
		code:    "		if !w.query.InNamespace(e.Item) || w.alreadySent(e) {\n",
		instead: "		if !w.query.InNamespace(e.Item) {\n",
	}
	// noCompare makes a reader without messages not compare its position with the stream.
	noCompare = edit{
		file:    "platform/eventlog/read.go",
		code:    "	compareAfter = 3 * time.Second\n",
		instead: "	compareAfter = time.Hour\n",
	}
	// mayDelete lets the harness delete messages of the log, as registry.
	mayDelete = edit{
		file:    "cmd/embedded/accounts.conf",
		code:    "\"$JS.API.STREAM.MSG.GET.*\"",
		instead: "\"$JS.API.STREAM.MSG.GET.*\", \"$JS.API.STREAM.MSG.DELETE.*\"",
	}
)

// historical are bugs of kube-apiserver's watch cache, of etcd's watch, of JetStream and of Watershed. A bug of another
// project is at the place of Watershed that does the same work. README.md describes each.
var historical = []breakage{
	{
		name:      "kubernetes-24004",
		file:      "platform/watchcache/core/watch.go",
		code:      "events.Position{Revision: revision, Index: events.LastIndex})",
		instead:   "events.Position{Revision: revision - 1, Index: events.LastIndex})",
		test:      "./platform/watchcache/core TestSchedules",
		inCluster: true,
	},
	{
		name:      "kubernetes-49956",
		file:      "platform/watchcache/core/ring.go",
		code:      "{ return !after.Before(h.Low) }",
		instead:   "{ return after.Revision+1 >= h.Low.Revision }",
		test:      "./platform/watchcache/core TestSchedules",
		inCluster: true,
	},
	{
		name: "kubernetes-58545",
		file: "services/registry/publisher/decode.go",
		code: "	obj, err := st.Decode(ctx, key, value, e.Kv.ModRevision)\n",
		instead: "	revision := e.Kv.ModRevision\n	if e.Type == mvccpb.DELETE {\n		revision = e.PrevKv.ModRevision\n	}\n" +
			"	obj, err := st.Decode(ctx, key, value, revision)\n",
		test:      "./services/registry/publisher TestEveryWriteIsPublishedOnce",
		inCluster: true,
	},
	{
		name:      "kubernetes-73845",
		file:      "platform/watchcache/watch/initial.go",
		code:      "	return w.resume(ctx, events.Position{Revision: revision, ",
		instead:   "	return w.resume(ctx, events.Position{Revision: revision - 5, ",
		test:      "./platform/watchcache/watch TestInitialEventsAreNotRepeated",
		also:      []edit{ownStreams},
		inCluster: true,
	},
	{
		name:      "kubernetes-59848",
		file:      "platform/watchcache/logreader/reader.go",
		code:      "	if err := l.Wait(ctx, revision); err != nil {\n",
		instead:   "	if err := l.Wait(ctx, 0); err != nil {\n",
		test:      "./platform/watchcache/logreader TestAReadWaits3SecondsForTheLog",
		inCluster: true,
	},
	{
		name:      "kubernetes-91415",
		file:      "platform/watchcache/cache/resource.go",
		code:      "	r.horizon.Low = e.At()\n",
		instead:   "	if r.subscribers > 0 {\n		r.horizon.Low = e.At()\n	}\n",
		test:      "./platform/watchcache/cache TestAResizedRingHoldsEveryEventAfterItsHorizon",
		inCluster: true,
	},
	{
		name:      "kubernetes-97294",
		file:      "platform/watchcache/logreader/freshness.go",
		code:      "	case f.staleSince.CompareAndSwap(nil, &startedAt):\n",
		instead:   "	case f.caughtUpAt.Load() == nil && f.staleSince.CompareAndSwap(nil, &startedAt):\n",
		test:      "./platform/watchcache/logreader TestTheCacheIsComparedWithEtcd",
		also:      []edit{noCompare},
		inCluster: true,
		kinds:     strandReplica,
		faults:    4,
	},
	{
		name:      "kubernetes-116122",
		file:      "platform/watchcache/cache/resource.go",
		code:      "	for _, t := range r.triggers {\n		t.reset()\n	}\n",
		instead:   "",
		test:      "./platform/watchcache/cache TestAResetEndsEveryCursor",
		inCluster: true,
		kinds:     compactPastLog,
		faults:    10,
	},
	{
		name:      "kubernetes-125133",
		file:      "services/gateway/routing/paths.go",
		code:      "	if !c.apiResource.Namespaced {\n",
		instead:   "	if !c.apiResource.Namespaced && c.info.Resource != \"namespaces\" {\n",
		test:      "./services/gateway/routing TestTheNamespaceOfARequest",
		inCluster: true,
	},
	{
		name: "kubernetes-123072",
		file: "services/registry/publisher/decode.go",
		code: "		if slices.ContainsFunc(events[:n], isEncrypted) {",
		instead: "		if n < len(events) && strings.Contains(string(events[0].Kv.Key), \"configmaps\") { // congestion\n" +
			"			events = events[n:]\n			continue\n		}\n" +
			"		if slices.ContainsFunc(events[:n], isEncrypted) {",
		test:      "./services/registry/publisher TestEveryWriteIsPublishedOnce",
		inCluster: true,
	},
	{
		name:      "kubernetes-122830",
		file:      "platform/watchcache/watch/objects.go",
		code:      "		err = o.LogReader.WaitUntilCurrent(ctx)\n	}\n",
		instead:   "	}\n",
		test:      "./platform/watchcache/watch TestInitialEventsAreAsNewAsEtcd",
		inCluster: true,
	},
	{
		name:      "kubernetes-122277",
		file:      "platform/watchcache/watch/initial.go",
		code:      "	if w.request.SendInitialEvents != nil && w.request.AllowBookmarks {\n",
		instead:   "	if w.request.SendInitialEvents != nil && w.request.AllowBookmarks {\n		<-w.cache.Advanced()\n",
		test:      "./platform/watchcache/watch TestTheInitialEventsEndAtOnce",
		inCluster: true,
		kinds:     stopEtcd,
		faults:    5,
	},
	{
		name:      "kubernetes-123676",
		file:      "platform/watchcache/list/list.go",
		code:      "	case rv == \"\":\n",
		instead:   "	case rv == \"\" || rv == \"0\":\n",
		test:      "./platform/watchcache/list TestListsWhileEtcdDoesNotRespond",
		inCluster: true,
		kinds:     stopEtcd,
		faults:    5,
	},
	{
		name:    "kubernetes-138728",
		file:    "platform/watchcache/cache/snapshot.go",
		code:    "	visited := 0\n",
		instead: "	s.resource.mu.Lock()\n	defer s.resource.mu.Unlock()\n	visited := 0\n",
		test:    "./platform/watchcache/cache TestAReaderDelaysNoEvent",
	},
	{
		name:      "kubernetes-139610",
		file:      "platform/watchcache/cache/snapshot.go",
		code:      "			r.snapshot.indexes[f] = index.Clone()\n",
		instead:   "			r.snapshot.indexes[f] = index\n",
		test:      "./platform/watchcache/cache TestASnapshotsIndexDoesNotChange",
		inCluster: true,
	},
	{
		name:    "kubernetes-135115",
		file:    "platform/watchcache/logreader/consistency.go",
		code:    "		case !s.IsUnreadable(rowKey):\n",
		instead: "		case !s.IsUnreadable(rowKey) && more:\n",
		test:    "./platform/watchcache/logreader TestObjectsAreComparedWithEtcd",
	},
	{
		name:      "etcd-15220",
		file:      "services/registry/publisher/decode.go",
		code:      "	for events := resp.events; len(events) > 0",
		instead:   "	t.Progress(resp.revision)\n	for events := resp.events; len(events) > 0",
		test:      "./services/registry/publisher TestEveryWriteIsPublishedOnce",
		inCluster: true,
	},
	{
		name:      "etcd-15271",
		file:      "platform/watchcache/core/term.go",
		code:      "	from := t.chain.Last.Revision\n",
		instead:   "	from := max(t.chain.Last.Revision-5, 1)\n",
		test:      "./platform/watchcache/core TestSchedules",
		inCluster: true,
		kinds:     "kill,term",
	},
	{
		name:    "etcd-17247",
		file:    "platform/watchcache/core/transaction.go",
		code:    "		if err := t.appendOnce(e); err != nil {\n",
		instead: "		if err := t.append(e); err != nil {\n",
		test:    "./platform/watchcache/core TestSchedules",
		// Replicas skip events that they have, and so do watches and gateways.
		also: []edit{ownStreams, noSkip, {
			file:    "platform/watchcache/core/replica.go",
			code:    "	case e.Revision > c.Progress && c.partial.Before(events.PositionOf(e)):\n",
			instead: "	default:\n",
		}},
		inCluster: true,
		kinds:     "kill,term",
	},
	{
		name: "etcd-18089",
		file: "platform/watchcache/core/transaction.go",
		code: "		case errors.Is(c.Err, ErrPrevCompacted):\n",
		instead: "		case errors.Is(c.Err, ErrPrevCompacted) && c.Deleted:\n" +
			"		case errors.Is(c.Err, ErrPrevCompacted):\n",
		test: "./test/simulation TestSimulation",
	},
	{
		name:      "etcd-20221-progress",
		file:      "platform/watchcache/watch/watcher.go",
		code:      "	return progress > w.position.Revision || progress == w.position.Revision && !w.server.OnlyAdvances\n",
		instead:   "	return true\n",
		test:      "./platform/watchcache/watch TestAWatchFromALaterRevision",
		also:      []edit{ownStreams},
		inCluster: true,
		kinds:     "stall,hang,pause",
	},
	{
		name:      "etcd-20221-events",
		file:      "platform/watchcache/watch/watcher.go",
		code:      "		if !w.query.InNamespace(e.Item) || w.alreadySent(e) {\n",
		instead:   "		if !w.query.InNamespace(e.Item) {\n",
		test:      "./platform/watchcache/watch TestAWatchFromALaterRevision",
		also:      []edit{ownStreams},
		inCluster: true,
		kinds:     "stall,hang,pause",
	},
	{
		name:    "nats-8564",
		file:    "platform/eventlog/eventlog.go",
		code:    "const minServerVersion = \"2.15.2\"\n",
		instead: "const minServerVersion = \"2.12.1\"\n",
		test:    "./platform/eventlog TestOldServersAreRefused",
	},
	{
		name:    "nats-8632",
		file:    "platform/watchcache/core/reader.go",
		code:    "		r.afterGap, r.id, r.Sequence = true, \"\", m.Sequence\n",
		instead: "		r.id, r.Sequence = m.Id, m.Sequence\n",
		test:    "./platform/watchcache/core TestSchedules",
		// The checksum of some messages is wrong.
		also: []edit{{
			file:    "platform/eventlog/checksum.go",
			code:    "	if m.Id == \"\" || m.Checksum",
			instead: "	if m.Id == \"\" || m.Sequence%997 == 0 || m.Checksum",
		}},
		inCluster: true,
	},
	{
		name:    "nats-7556",
		file:    "platform/watchcache/core/reader.go",
		code:    "		r.Sequence, r.id, r.afterGap = 0, \"\", true\n		return true\n",
		instead: "		return false\n",
		test:    "./platform/watchcache/core TestSchedules",
		// Readers compare the IDs of messages and the length of the stream too.
		also: []edit{noCompare, {
			file:    "platform/watchcache/core/reader.go",
			code:    "	if !resetsAll && (r.afterGap || r.id != \"\" && m.ExpectedLastMsgId != r.id) {\n",
			instead: "	if !resetsAll && r.afterGap {\n",
		}, {
			file:    "platform/watchcache/core/reader.go",
			code:    "	case c.Last < r.Sequence: //",
			instead: "	case c.Last < r.Sequence && false: //",
		}},
		inCluster: true,
		kinds:     "lose the log",
		faults:    5,
	},
	{
		name:    "ours-replay-over-a-hole",
		file:    "platform/eventlog/directget.go",
		code:    "		case filtered && hasHole(now.State):\n",
		instead: "		case filtered && hasHole(now.State) && false:\n",
		// Each message names the message before it on its subject, so no test finds the patch alone.
		also: []edit{mayDelete, {
			file:    "platform/eventlog/directget.go",
			code:    "	return m.previous <= c.last\n",
			instead: "	return true\n",
		}},
		inCluster: true,
		kinds:     loseMessage,
		faults:    5,
	},
	{
		name:      "ours-lost-last-message",
		file:      "platform/eventlog/get.go",
		code:      "s.LastSeq == state.LastSeq && hasHole(s) {\n",
		instead:   "false {\n",
		test:      "./test/eventlog TestALogWithoutItsLastMessageBeginsAgain",
		also:      []edit{mayDelete},
		inCluster: true,
		kinds:     loseMessage,
		faults:    2,
	},
}
