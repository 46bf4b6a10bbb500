package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
)

// replicasWarm is the number of lists after which very likely every replica has served a list.
const replicasWarm = 6

func (s *server) lists(row, accept string, limit int) map[string]float64 {
	for range replicasWarm { // each replica caches the response that it has served once
		s.list(s.client, accept, limit)
	}
	before, megabytes := s.begin(), 0.0
	for range 5 {
		megabytes += float64(s.list(s.client, accept, limit)) / 1e6
	}
	return map[string]float64{row: (s.cpu() - before) * 1000 / megabytes}
}

// compressedLists lists with gzip, as client-go and kubectl do. Some rows list unchanged pods; the others change 1 %
// of the pods before every three lists. Megabytes are uncompressed.
func (s *server) compressedLists() map[string]float64 {
	out := map[string]float64{}
	const (
		asJSON     = "application/json"
		asProtobuf = "application/vnd.kubernetes.protobuf"
		asTable    = "application/json;as=Table;v=v1;g=meta.k8s.io" // kubectl's media type
	)
	some := max(1, *pods/100)
	for _, row := range []struct {
		name, accept   string
		limit, changed int
	}{
		{"LIST pods, JSON, gzip, as they were", asJSON, 0, 0},
		{"LIST pods, JSON, gzip, 1 % changed between three", asJSON, 0, some},
		{"LIST pods, protobuf, gzip, 1 % changed between three", asProtobuf, 0, some},
		{"LIST pods, Table, gzip, 1 % changed between three", asTable, 0, some},
		{"LIST pages of 500, JSON, gzip, 1 % changed between three", asJSON, 500, some},
	} {
		size := 0
		for range replicasWarm {
			size = s.list(s.gzipClient, row.accept, row.limit)
		}
		seconds, megabytes := 0.0, 0.0
		for round := range 10 {
			for i := range row.changed {
				note := fmt.Sprintf(`{"metadata":{"annotations":{"round":"%d"}}}`, serial.Add(1))
				pod := fmt.Sprintf("/api/v1/namespaces/bench/pods/p%d", (i*100+round)%*pods)
				s.do("PATCH", pod, "", []byte(note), 200)
			}
			before := s.cpu()
			for range 3 {
				if row.limit > 0 {
					s.list(s.gzipClient, row.accept, row.limit)
					// the client reads longer than the server works, and the server is idle meanwhile
				} else if !s.packed(context.Background(), s.client, "/api/v1/namespaces/bench/pods", row.accept) {
					log.Fatalf("%s: %s: the response is not gzip", s.name, row.name)
				}
				megabytes += float64(size) / 1e6
			}
			seconds += s.cpu() - before
		}
		out[row.name+" (CPU ms/MB)"] = seconds * 1000 / megabytes
	}
	return out
}

// packed requests a response with gzip and discards the body. It returns true if the response is compressed.
func (s *server) packed(ctx context.Context, client *http.Client, path, accept string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	check(err)
	req.Header.Set("Accept", accept)
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err == nil && resp.StatusCode == http.StatusOK && resp.Header.Get("Content-Encoding") == "gzip"
}

func (s *server) list(client *http.Client, accept string, limit int) (n int) {
	next := ""
	for {
		path := "/api/v1/namespaces/bench/pods"
		if limit > 0 {
			path += fmt.Sprintf("?limit=%d&continue=%s", limit, next)
		}
		body := s.doBy(client, "GET", path, accept, nil, 200)
		n += len(body)
		if limit == 0 {
			return n
		}
		var head struct{ Metadata struct{ Continue string } }
		check(json.Unmarshal(body, &head))
		if next = head.Metadata.Continue; next == "" {
			return n
		}
	}
}
