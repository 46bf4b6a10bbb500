package routing

import (
	"context"
	"net/http"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/warnings"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/h2writer"
	"watershed.dev/services/gateway/responsewriters"
)

// fail writes an error, with its warnings and its audit context.
func (c *requestContext) fail(err error) {
	warnings.Forward(c.req.Context(), rpc.Warnings(err))
	audit.RecordContext(c.req.Context(), rpc.AuditContextOf(err), c.req.Header.Get("Content-Type"), c.body)
	responsewriters.ResourceError(c.w, c.req, c.groupVersion(), rpc.WithoutDetails(err))
}

// writeResponse writes registry's response.
func (c *requestContext) writeResponse(resp *registryv1.ObjectResponse) {
	ctx := c.req.Context()
	warnings.Forward(ctx, resp.Warnings)
	audit.RecordContext(ctx, resp.Audit, c.req.Header.Get("Content-Type"), c.body)
	if audit.IncludesResponse(ctx) {
		audit.RecordResponse(ctx, c.out.MediaType, resp.Body)
	}
	to := body.NewWriter(c.w, c.req, c.out.MediaType, int(resp.Code), int64(len(resp.Body)))
	_, _ = to.Write(resp.Body)
	_ = to.Close()
}

// hijackAbove is the body size in bytes above which a body bypasses the HTTP/2 server, because the server copies and
// frames it in small pieces.
const hijackAbove = 64 << 10

// startResponse starts the response that begins with a chunk. It returns functions that write data and end the
// response.
func (c *requestContext) startResponse(ctx context.Context, first *rpc.Chunk) (write func([][]byte) error, end func()) {
	if audit.IncludesResponse(ctx) {
		return c.startAuditedResponse(ctx, first.Size)
	}
	stream := h2writer.StreamFrom(c.req)
	compress := !first.Gzip && body.ShouldCompress(c.req, first.Size)
	hijacked := stream != nil && first.Size > hijackAbove && !compress
	var to *body.Writer
	if first.Gzip || hijacked {
		to = body.NewEncoded(c.w, c.out.MediaType, http.StatusOK, first.Gzip)
	} else {
		to = body.NewWriter(c.w, c.req, c.out.MediaType, http.StatusOK, first.Size)
	}
	if hijacked && http.NewResponseController(c.w).Flush() == nil && stream.Hijack(ctx, 0) {
		writeTimeout := c.router.Tier.Watches.Config.WriteTimeout
		return func(parts [][]byte) error {
			return stream.Write(ctx, writeTimeout, parts...)
		}, func() { _ = stream.Finish(ctx) }
	}
	return func(parts [][]byte) error {
		for _, p := range parts {
			if _, err := to.Write(p); err != nil {
				return err
			}
		}
		return nil
	}, func() { _ = to.Close() }
}

// startAuditedResponse is startResponse for a response whose body is audited. It buffers the whole body.
func (c *requestContext) startAuditedResponse(
	ctx context.Context,
	size int64,
) (write func([][]byte) error, end func()) {
	data := make([]byte, 0, max(size, 0))
	return func(parts [][]byte) error {
			for _, p := range parts {
				data = append(data, p...)
			}
			return nil
		}, func() {
			c.writeResponse(&registryv1.ObjectResponse{Code: http.StatusOK, Body: data})
		}
}
